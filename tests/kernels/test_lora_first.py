"""Many rows on CUDA: the adapters' part is written first, and the base products are added into it."""

import dataclasses
import importlib

import pytest
import support
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from riftco.functional import GGUFWeight, dequantize_gguf, dequantize_nf4, quantize_nf4
from riftco.kernels import _contract, gguf_linear, nf4
from riftco.kernels._frozen_weight import DENSE, Base
from riftco.kernels.lora_linear import cuda, route, tiles
from riftco.memory import meta

pytest.importorskip("triton")
gguf_cuda = importlib.import_module("riftco.kernels.gguf_linear.cuda")
KERNELS = support.device_params(("cpu-triton", "cuda"))
N, K = 48, 64


def weight(kind, device):
    """(its base, W in float32)"""
    g = torch.Generator().manual_seed(3)
    w = torch.randn(N, K, generator=g)
    if kind == DENSE:
        return Base(DENSE, [w.to(device)], []), w
    if kind == "nf4_linear":
        q = quantize_nf4(w)
        return Base(kind, *q.to(device).operands()), dequantize_nf4(q, torch.float32)
    codes = torch.randint(0, 256, (N, K // 32 * 34), dtype=torch.uint8, generator=g)
    codes.view(N, K // 32, 34)[:, :, :2] = torch.tensor([0.01]).half().view(torch.uint8)  # the scale of each block
    q = GGUFWeight(codes, "Q8_0", (N, K))
    return Base("gguf_linear:Q8_0", [codes.to(device)], [N, K]), dequantize_gguf(q, torch.float32)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("kind", [DENSE, "nf4_linear", "gguf_linear:Q8_0"])
@pytest.mark.parametrize("rows", [0, 1, 9, 80])
def test_a_product_is_added_in_place(device, kind, rows, monkeypatch):
    """Whatever kernel a format takes for so many rows; in stretches of a scratch that holds a part of W."""
    for module in (nf4.route, gguf_cuda):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 4 * K * 7)
    base, w = weight(kind, device.torch_device)
    x, d_y, y, d_x = (torch.randn(2, rows, width) for width in (K, N, N, K))
    with device.use(), support.poisoned():
        onto_y, onto_x = y.clone().to(device.torch_device), d_x.clone().to(device.torch_device)
        got_y = base.forward(x.to(device.torch_device), None, _contract.launcher, onto=onto_y)
        got_x = base.backward(d_y.to(device.torch_device), _contract.launcher, onto=onto_x)
    assert got_y.data_ptr() == onto_y.data_ptr() and got_x.data_ptr() == onto_x.data_ptr()
    torch.testing.assert_close(got_y.cpu(), y + x @ w.t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got_x.cpu(), d_x + d_y @ w, rtol=1e-5, atol=1e-4)


def test_what_comes_first():
    assert route.route(65, False).name == "adapters first"
    assert route.route(64, False).name == "base first" and "64 rows" in route.route(64, False).why
    assert route.route(4096, True).name == "base first" and "rows are listed" in route.route(4096, True).why
    assert max(nf4.route.FEW_ROWS, gguf_linear.route.FEW_ROWS) <= route.FEW_ROWS  # else their kernels add nothing
    assert [name for _, name, _ in route.routes(torch.bfloat16)] == ["base first", "adapters first", "base first"]


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("down_the_rows", [1, 3])
@pytest.mark.parametrize("dtype,adapter", [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_adapters_alone(device, down_the_rows, dtype, adapter, monkeypatch):
    """Bias, strided B, ranks of several sizes, and programs that make several tiles of rows."""
    real = tiles.alone
    monkeypatch.setattr(tiles, "alone", lambda *a: dataclasses.replace(real(*a), tiles=down_the_rows))
    where, g = device.torch_device, torch.Generator().manual_seed(1)
    x = torch.empty(2, 165, 8, dtype=dtype)
    bs = [torch.randn(R, width, generator=g).to(adapter).t() for width, R in ((140, 3), (20, 70), (5, 16))]
    aa = [torch.randn(R, 75, generator=g).to(adapter) for R in (3, 70, 16)]
    biases, scales = [torch.arange(140) / 32, None, torch.tensor([1.5]).expand(5)], [2.0, 0.5, -1.0]
    xa = torch.randn(330, 89, generator=g).to(adapter)
    with device.use(), support.poisoned():
        ys = cuda._up_each_alone(
            x.to(where), [None if b is None else b.to(where) for b in biases], xa.to(where), [b.to(where) for b in bs],
            scales,
        )  # fmt: skip
        d_x = cuda._up_alone(x.to(where), None, 0.0, xa.to(where), [a.to(where) for a in aa])
    parts = xa.double().split([3, 70, 16], 1)
    each = zip(parts, bs, biases, scales)
    wants = [s * (p @ b.double().t()) + (0.0 if c is None else c) for p, b, c, s in each]
    wants.append(sum(p @ a.double() for p, a in zip(parts, aa)))
    for got, want in zip((*ys, d_x), wants):
        assert got.dtype == dtype and got.is_contiguous() and got.shape == (2, 165, want.shape[1])
        error = (got.cpu().double().view(want.shape) - want).abs()
        assert (error <= want.abs() * torch.finfo(dtype).eps + 2e-4 * want.abs().max()).all()


class Made(TorchDispatchMode):
    """How many tensors of `numel` elements take memory of their own."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.seen = numel, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.numel() == self.numel and func._schema.returns[0].alias_info is None:
                self.seen[id(t.untyped_storage())] = t
        return out


@pytest.mark.parametrize("rows,buffers", [(100, 1), (30, 3)])
def test_no_buffer_a_member(rows, buffers):
    """d_x of a group is made in one buffer; the predictor counts as many as the launcher makes."""
    base, _ = weight("nf4_linear", "cpu")
    R = 4
    device = next(d for d in support.DEVICES if d.name == "cpu-triton")
    if not device.available:
        pytest.skip(f"cpu-triton: {device.why_not}")

    def backward(launch, where):
        x, d_ys, xa = torch.empty(rows, K), [torch.randn(rows, N) for _ in range(3)], torch.randn(rows, 3 * R)
        aa, bb = [torch.randn(R, K) for _ in range(3)], [torch.randn(N, R) for _ in range(3)]
        x, xa, d_ys, aa, bb = x.to(where), xa.to(where), *([t.to(where) for t in ts] for ts in (d_ys, aa, bb))
        weights = [t.to(where) for t in base.tensors * 3]
        with Made(rows * K) as made:
            launch(
                d_ys, x, [base.kind] * 3, weights, base.sizes * 3, aa, bb, xa, [1.0] * 3, None, 0.0, None, True,
                [False] * 3, False, False,
            )  # fmt: skip
        return len(made.seen)

    with device.use():
        assert backward(cuda.backward, "cpu") == buffers
    with meta.MetaTrace("cuda"):
        pass  # defines the ops
    choices = {f"nf4_linear_{d}": getattr(meta, f"nf4_{f}") for d, f in (("fwd", "forward"), ("bwd", "backward"))}
    real, meta.launcher = meta.launcher, lambda name, t: choices[name]
    try:
        assert backward(meta.lora_backward, "meta") == buffers
    finally:
        meta.launcher = real
