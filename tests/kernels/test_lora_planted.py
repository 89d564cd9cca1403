"""lora_linear: bugs planted in its kernels must be caught, and rows outside touch no foreign memory."""

import pytest
import support
import torch

from riftco.functional import lora_linear
from riftco.kernels.lora_linear import cases


@pytest.mark.parametrize(
    "module,old,new,case",
    [
        ("kernels", "tl.store(at_out, accs[i] * factor", "tl.store(at_out, accs[i]", "dropout"),
        ("kernels", "        out_ptr += ranks[i]\n", "", "group"),
        ("kernels", "            acc += product_for(", "            acc = product_for(", "rank 130"),
        ("kernels", "        acc *= factor\n", "", "rank 1"),
        ("kernels", "at = row[:, None] * N + n[None, :]", "at = m[:, None] * N + n[None, :]", "rows"),
        ("kernels", "acc = tl.where(kept(", "acc = tl.where((m >= 0)[:, None] | kept(", "NF4 base, rows, dropout"),
        ("kernels", "acc = add_product(acc, tl.trans(", "acc = add_product(acc * 0, tl.trans(", "dropout"),
        ("kernels", "stop = tl.minimum((s + 1) * rows_each, M)", "stop = M", "dropout"),
        ("kernels", "HAS_KEEP and i == 0, HAS_ROWS, BM, BC", "HAS_KEEP, HAS_ROWS, BM, BC", "dropout"),
        ("kernels", "for i in tl.static_range(1, len(parts)):", "for i in tl.static_range(2, len(parts)):", "group"),
        ("kernels", "        first += ranks[i]\n    return w", "    return w", "group"),
        ("kernels", "xa_ptr + first, (ws[i],)", "xa_ptr, (ws[i],)", "group"),
        ("kernels", "* M * R + first, wheres[i]", "* M * R, wheres[i]", "group"),
        ("kernels", "split * width, M, C", "0, M, C", "few rows, many features"),
        ("cuda", "out[0] if tile.splits == 1 else out.sum(0)\n", "out[0]\n", "dropout"),
        ("cuda", "total, (1, ranks[i])))", "total, (b.shape[0], 1)))", "odd sizes, bias"),
        ("cuda", "sum(ranks[:i])", "0", "group"),
        ("cuda", "        parts = parts[:1]\n", "", "group, rows"),
        ("cuda", "launcher, onto=y)", "launcher)", "several tiles"),
        ("cuda", "launcher, onto=d_x)", "launcher)", "several tiles"),
        ("alone", "                acc += product_for(", "                acc = product_for(", "several tiles"),
        ("alone", "            acc *= factor\n", "            pass\n", "several tiles"),
        ("alone", "            acc += bias[None, :]\n", "            pass\n", "several tiles"),
        ("alone", "acc = tl.where(kept(", "acc = tl.where((m >= 0)[:, None] | kept(", "dropout"),
        ("alone", "xa_ptr + first, (ws[i],)", "xa_ptr, (ws[i],)", "group of several tiles"),
        ("alone", "(strip - before) * BN", "strip * BN", "group of several tiles"),
        ("rescale_cuda", "        y += tl.load(bias_ptr", "        y -= tl.load(bias_ptr", "DoRA"),
        ("rescale_cuda", "d_y * gain[None, :], mask=live", "d_y, mask=live", "DoRA"),
        ("rescale_cuda", "            total += tl.sum(d_y * z, 0)", "            total = tl.sum(d_y * z, 0)", "DoRA"),
        ("rescale_cuda", "out.sum(0) if splits > 1 else out[0]", "out[0]", "DoRA"),
    ],
)
def test_planted_bugs(module, old, new, case):
    support.assert_caught(cases, f"riftco.kernels.lora_linear.{module}", old, new, case)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("part.mul_(inverse_keep(seed, dropout_p))", "pass", "dropout"),
        ("h, inverse)", "h, 1.0)", "dropout"),
        ("h = _masked(_given(lines)[chosen], seed, rows, lo, hi, dropout_p)", "h = _given(lines)[chosen]", "dropout"),
        ("        out[chosen].addmm_(left, right, alpha=scale)", "        out[chosen].addmm(left, right)", "rank 1"),
        ("            d_x.addmm_(up, base.tensors[0])", "            pass", "group"),
        ("            d_x.add_(base.backward(up, launcher))", "            pass", "group, NF4 base, dropout"),
        ("torch.arange(lo, hi) if rows is None", "torch.arange(lo, hi) if True", "group, rows"),
    ],
)
def test_planted_bugs_on_the_cpu(old, new, case):
    support.assert_caught(cases, "riftco.kernels.lora_linear.cpu", old, new, case, device="cpu")


def test_rows_that_are_not_there_touch_no_foreign_memory():
    device = next(d for d in support.DEVICES if d.name == "cpu-triton")
    if not device.available:
        pytest.skip(f"cpu-triton: {device.why_not}")
    x = torch.randn(3, 8, requires_grad=True)
    with device.use():
        y = lora_linear(
            x, torch.randn(2, 8), torch.randn(1, 8), torch.randn(2, 1), scale=1.0, rows=torch.tensor([1, 1 << 40])
        )
        y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
