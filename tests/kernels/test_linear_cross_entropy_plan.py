"""How many rows a slice takes, and what it then holds."""

from dataclasses import replace

import pytest
import torch
from test_linear_cross_entropy import Live, problem

from riftco.kernels.linear_cross_entropy import cpu, panels, slices
from riftco.kernels.linear_cross_entropy.plan import Filled, plan


@pytest.mark.parametrize("count", [0, 1, 7, 128, 1000, 8192])
@pytest.mark.parametrize("slice_bytes", [1, 999, 100_000, 1 << 20, 1 << 30])
def test_plan(count, slice_bytes):
    made = plan(count, 1000, slice_bytes)
    assert made.rows * 1000 <= slice_bytes or made.rows == 1 or count <= 1
    assert made.rows * made.slices >= count > made.rows * (made.slices - 1) or count == 0
    assert made.why and (made.slices <= 1 or str(count) in made.why)


def test_plan_of_slices_that_fill_a_device():
    """Sizes that 132 processors take best, as measured: whole rounds of tiles, few slices where each adds to dW."""
    wide, trained = Filled(16, 132, 0.05), Filled(16, 132, 0.5)  # C 4096
    logits = 128256 * 2
    assert plan(8192, logits, 512 << 20, filled=trained).rows == 2048
    assert plan(8192, logits + 4 * 4096, 512 << 20, filled=trained).rows == 1920  # gathered: 5 slices of 1664 before
    assert plan(8192, logits, 256 << 20, filled=wide).rows == 1024
    assert plan(8192, 2 * logits, 512 << 20, filled=wide).rows == 1024
    for count, row_bytes, budget in ((8192, 999, 1 << 20), (5, 9, 20), (1000, 7, 3000), (8191, logits, 100 << 20)):
        made = plan(count, row_bytes, budget, filled=trained)
        assert made.rows * row_bytes <= budget and made.rows * made.slices >= count > made.rows * (made.slices - 1)
        assert trained.cost(count, made.rows) <= trained.cost(count, plan(count, row_bytes, budget).rows)
    assert "fill 132" in plan(8192, logits + 4 * 4096, 512 << 20, filled=trained).why


@pytest.mark.parametrize("C, processors", [(8192, 24), (4096, 14), (8192, 20), (40960, 132)])
def test_fewer_processors_than_tiles_of_a_row(C, processors):
    """No number of rows is a whole round; none is not one either."""
    filled = Filled(-(-C // 256), processors, 0.5)
    assert filled.whole_rounds(127) == set() and 0 not in filled.whole_rounds(4096)
    sizes = panels.Sizes(128256, 8192, 2, 4 * C, 4 * C, 0, 4 * C, 64 << 20)
    found = panels.first(8192, sizes, 2 * 128256, filled)
    assert found is None or found[0].rows + found[1].rows * found[1].slices >= 8192


def test_a_product_that_leaves_processors_idle_is_made_in_two():
    """At C 2304 of 132 processors 1024 rows' d_x; not few tiles, which cuBLAS divides by itself, and not enough."""
    filled = Filled(9, 132, 0.5)
    assert filled.parts(1024) == (slice(0, 512), slice(512, 1024)) and filled.parts(1409) == (slice(0, 1409),)
    assert all(len(filled.parts(n)) == 1 for n in (1, 128, 512, 896, 1536, 4096))
    for n in range(1, 3000, 77):
        assert [i for part in filled.parts(n) for i in range(n)[part]] == list(range(n))


@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_of_products_in_two(rank):
    x, weight, y = torch.randn(300, 8), torch.randn(40, 8), torch.arange(300) % 40
    adapter = dict(lora_a=torch.randn(rank, 8), lora_b=torch.randn(40, rank), lora_scale=0.5) if rank else {}
    p = problem(x, weight, y, slice_bytes=1 << 20, **adapter)
    two = replace(cpu.LOSS, filled=lambda p, need_weight: Filled(1, 5, 0.5))
    assert len(two.filled(p, True).parts(300)) == 2
    need = [True, True, rank > 0, rank > 0, False]
    for a, b in zip(*(slices.backward(loss, None, *p, torch.float32, need) for loss in (cpu.LOSS, two))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_slices_of_views_hold_their_logits_alone():
    """Rows that lie together are read where they are, their gradients written where they belong."""
    x, weight, y = torch.randn(64, 8), torch.randn(40, 8), torch.arange(64) % 40
    row = 40 * (4 + cpu.LOSS.temporaries(problem(x, weight, y)))
    for gap, more in ((False, 0), (True, 2 * 4 * 8)):
        y[5] = -100 if gap else 5
        p = problem(x, weight, y, slice_bytes=9 * (row + more))
        *_, made = slices._prepare(cpu.LOSS, p)
        assert (made.slices, made.rows) == ((7, 9) if gap else (8, 8))


@pytest.mark.parametrize("gap", [False, True])
def test_what_onednn_makes_beside_the_logits_is_counted(gap):
    """Of a weight as wide as it is long a slice's d_x, made apart and copied, is as large as its logits."""
    N, C, slice_bytes = 512, 512, 256 << 10
    x, weight, y = torch.randn(N, C), torch.randn(C, C), torch.arange(N)
    if gap:
        y[5] = -100
    with Live() as live, torch.no_grad():
        p = problem(x, weight, y, slice_bytes=slice_bytes)
        cpu.backward(None, *p, torch.float32, [True, False, False, False, False])
    assert live.peak - x.nbytes <= slice_bytes + 100 * N
