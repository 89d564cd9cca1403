"""Attention composed of PyTorch's operations against the spec: tiles, memory, planted bugs."""

import pytest
import support
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from riftco.kernels._cases import Case
from riftco.kernels.attention import cases, composed, spec
from riftco.kernels.attention.composed import Tiles


def both(case, dtype=torch.float64):
    """The inputs of forward and, after d_out, d_lse, of backward."""
    inputs = cases.make_inputs(case, torch.Generator().manual_seed(0))
    inputs = {n: t.to(dtype) if t.dtype == torch.float64 else t for n, t in inputs.items()}
    seed = cases._seed(case, torch.device("cpu"))
    args = (inputs["q"], inputs["k"], inputs["v"], *cases._tensors(inputs), seed, *cases._options(case))
    out, lse = spec.forward(*args)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (out, lse)]
    return args, (*upstream, *args[:3], out, lse, *args[3:], case.options.get("kv_grad_start", 0), False)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("tiles", [Tiles(), Tiles(keys=16), Tiles(32, 7)], ids=lambda t: f"{t.rows}x{t.keys}")
def test_tiles_are_the_spec(case, tiles):
    """In float64 all tilings must give what the spec gives."""
    args, saved = both(case)
    torch.testing.assert_close(composed.forward(*args, tiles=tiles), spec.forward(*args))
    want = spec.backward(*saved, *(True,) * 5)
    torch.testing.assert_close(composed.backward(*saved, *(True,) * 5, tiles=tiles), want)
    for i in range(5):
        needs = [i == j for j in range(5)]
        only = composed.backward(*saved, *needs, tiles=tiles)
        torch.testing.assert_close(only[i], want[i])
        assert all(t.numel() == 0 for j, t in enumerate(only[:5]) if j != i)


class Watch(TorchDispatchMode):
    """Elements of the largest tensor among the results, and how many values went to the host."""

    def __init__(self):
        super().__init__()
        self.largest = self.synchronisations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.synchronisations += func.__name__.startswith(("_local_scalar_dense", "item", "nonzero"))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


def test_memory_is_that_of_a_tile_and_nothing_is_read_back():
    T = 700
    case = Case("all", dict(B=1, T=T, S=T, H=2, K=1, D=8, DV=8), dict(
        causal=True, window=(650, 0), softcap=2.0, sinks=True, bias=(1, 2, T, 1), k_lens=(690,), dropout_p=0.2,
        kv_grad_start=100))  # fmt: skip
    args, saved = both(case, torch.float32)
    tiles = Tiles(64, 128)
    with Watch() as watch:
        out = composed.forward(*args, tiles=tiles)
        grads = composed.backward(*saved, *(True,) * 5, tiles=tiles)
    assert watch.synchronisations == 0
    assert watch.largest <= 4 * 2 * 64 * 128  # dropout's four words at once; T x S would be 490,000
    torch.testing.assert_close(out, spec.forward(*args), atol=1e-5, rtol=1e-4)
    for a, b in zip(grads, spec.backward(*saved, *(True,) * 5)):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_tiles_that_no_row_sees_are_left_out():
    q, k, v = (torch.randn(1, 256, 1, 8) for _ in range(3))

    def operations(left, start=0):
        args = (q, k, v, *(None,) * 6, None, left, 0, 0.0, 0.0)
        counts = []
        for count in (lambda: composed.forward(*args, tiles=Tiles(32, 32)),
                      lambda: composed.backward(q, None, q, k, v, q, q.new_zeros(1, 1, 256), *args[3:], start, False,
                                                False, True, True, False, False, tiles=Tiles(32, 32))):  # fmt: skip
            with torch.profiler.profile() as profile:
                count()
            counts.append(sum(e.name == "aten::bmm" for e in profile.events()))
        return counts

    assert operations(None) == [2 * 36, 4 * 36]  # of 64 tiles
    assert operations(31) == [2 * 15, 4 * 15]
    assert operations(None, start=224) == [2 * 36, 4]  # keys below have no work at all where q needs none


def test_the_power_of_two_is_frexps():
    g = torch.tensor([0.0, 6e-8, 1e-7, 0.5, 1, 3.9, 4, 7.99, 8, 65504, torch.inf]).half().view(-1, 1, 1, 1)
    want = (3 - torch.frexp(g.flatten().float()).exponent).masked_fill((g.flatten() == 0) | g.flatten().isinf(), 0)
    assert torch.equal(spec.dout_exponent(g, None).flatten(), want)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("total, top = total * shrink +", "total, top = total +", "causal, more keys"),
        ("acc = acc * shrink +", "acc = acc +", "causal, more keys"),
        ("d_p * kept) - delta)", "d_p * kept))", "bias"),
        ("to += problem", "to -= problem", "bias"),
        ("(p if kept is None else p * kept).mT", "p.mT", "dropout"),
        ("(1.0 - (capped / softcap).square())", "1.0", "softcap"),
        ("mine.start >= 0 else None", "mine.start > 0 else None", "gradients of the last keys"),
        ("wanted_v[:, :, mine] += ", "wanted_v[:, :, mine] -= ", "odd sizes"),
    ],
)
def test_planted_bugs(old, new, case):
    args, saved = both(next(c for c in cases.CASES if c.name == case))
    with support.mutant("riftco.kernels.attention.composed", old, new), pytest.raises(AssertionError):
        torch.testing.assert_close(composed.forward(*args, tiles=Tiles(32, 16)), spec.forward(*args))
        torch.testing.assert_close(
            composed.backward(*saved, *(True,) * 5, tiles=Tiles(32, 16)), spec.backward(*saved, *(True,) * 5)
        )


def test_tiles_shrink_with_sequences_and_heads():
    for shape in ((1, 9, 1, 8), (64, 9, 32, 8), (4096, 9, 32, 8), (9, 8, 8), (0, 9, 2, 8)):
        q = torch.empty(shape, device="meta")
        tiles = composed.fitting(q)
        heads = q.shape[:-3].numel() * q.shape[-2]
        assert heads * tiles.rows * tiles.keys <= composed.SCORES or (tiles.rows, tiles.keys) == (16, 256)
        assert tiles.rows <= 512 and tiles.keys <= 4096
    assert composed.fitting(torch.empty(1, 9, 16, 8)) == Tiles()


def test_the_power_of_two_of_each_document_and_head():
    g = (torch.randn(40, 3, 8) * 1e-3).half()
    g[19:] = torch.nan  # rows of no document
    cu = torch.tensor([2, 5, 5, 12, 19])
    got = spec.dout_exponent(g, cu)
    for a, b, row in zip(cu[:-1], cu[1:], got):
        largest = g[a:b].float().abs().amax((0, 2)) if b > a else torch.zeros(3)
        want = torch.where(largest == 0, 0, 3 - torch.frexp(largest).exponent)
        assert torch.equal(row, want.int())
