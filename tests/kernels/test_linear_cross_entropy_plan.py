"""How many rows a slice takes, and what it then holds."""

import pytest
import torch
from test_linear_cross_entropy import Live, problem

from riftco.kernels.linear_cross_entropy import cpu, slices
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
