"""float16 heads: gradients of rows whose upstream gradients are small, large, or none of a labelled row's."""

import pytest
import support
import torch
import torch.nn.functional as F
from test_linear_cross_entropy import make

from riftco.functional import linear_cross_entropy

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


def against_float64(device, upstream, **options):
    """d_x and d_weight for a gradient a row, beside those of float64, where row 3 has no label."""
    x, weight, y = make(8, V=40, dtype=torch.float16, device=device.torch_device)
    y[3] = -100
    upstream = upstream.to(x.device)
    leaves = [(t / 8).requires_grad_() for t in (x, weight)]  # gradients that float16 holds
    with device.use(), support.poisoned():
        loss = linear_cross_entropy(*leaves, y, reduction="none", slice_bytes=400, **options)
        got = torch.autograd.grad(loss, leaves, upstream)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    loss = F.cross_entropy(wide[0] @ wide[1].t(), y, reduction="none")
    want = torch.autograd.grad(loss, wide, upstream.double().where(y >= 0, 0.0))
    for g, w in zip(got, want):
        assert (g.double() - w).norm() <= 0.004 * w.norm(), (g, w)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2.0**-12, 1.0, 2.0**12, 2.0**15])
def test_upstream_of_any_size(device, size):
    """From 2 ** 15 on float16 does not hold the power of two that is put back."""
    against_float64(device, torch.linspace(0.5, 1.0, 8) * size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counted", [None, 8])
@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_what_a_row_without_a_label_is_sent_counts_for_nothing(device, value, counted):
    """As losses divided by lengths send it, where a length is 0."""
    upstream = torch.full((8,), 1e-4)
    upstream[3] = value
    against_float64(device, upstream, n_labelled=counted)
