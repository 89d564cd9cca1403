"""x W^T on the CPU: through oneDNN and without it, whatever lies where."""

import pytest
import torch

from riftco.kernels import _matmul
from riftco.kernels._matmul import matmul


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("M,N,K", [(5, 7, 3), (1, 7, 3), (64, 130, 70), (0, 7, 3), (5, 0, 3), (5, 7, 0)])
def test_against_float64(monkeypatch, onednn, dtype, bound, M, N, K):
    monkeypatch.setattr(_matmul, "WORTH_FROM", 1 if onednn else 1 << 40)
    x, w, gaps = torch.randn(M, 2 * K), torch.randn(K, N), torch.randn(2 * N)
    for rows in (x[:, :K], x[:, ::2], x[:, :K].t().contiguous().t()):
        for weight in (w.t(), w.t().contiguous()):
            for bias in (None, gaps[::2], gaps[:1].expand(N)):
                a, b, c = (None if t is None else t.to(dtype) for t in (rows, weight, bias))
                want = a.double() @ b.double().t() + (0 if c is None else c.double())
                wide = torch.full((M, 2 * N), torch.nan, dtype=dtype)
                made, out = matmul(a, b, c), matmul(a, b, c, out=wide[:, :N])
                assert torch.equal(made, out) and out.data_ptr() == wide.data_ptr()
                assert wide[:, N:].isnan().all()
                torch.testing.assert_close(made.double(), want, rtol=bound, atol=bound * max(K, 1) ** 0.5)


@pytest.mark.skipif(_matmul._onednn is None, reason="PyTorch without oneDNN")
def test_tiles_change_no_bit_of_onednn():
    """Of the rows, of the weight's rows, and whatever its strides: what A4.5 asks of a weight decoded in stretches."""
    x, w = torch.randn(300, 576), torch.randn(1536, 576)
    whole = matmul(x, w)
    assert torch.equal(whole[:, 500:900], matmul(x, w[500:900])) and torch.equal(whole[:77], matmul(x[:77], w))
    assert torch.equal(whole, matmul(x, w.t().contiguous().t()))


def test_float16_and_other_devices_are_torchs(monkeypatch):
    monkeypatch.setattr(_matmul, "_onednn", None)
    x, w = torch.randn(5, 4), torch.randn(3, 4)
    assert torch.equal(matmul(x, w), x @ w.t())
    for other in (x, x.half(), x.to("meta")):
        assert not _matmul.through_onednn(other, torch.empty(999, 999))  # without oneDNN


@pytest.mark.parametrize("stride", [(1, 1), (3, 1), (1, 3), (2, 2), (0, 1), (1, 0), (200, 100)])
def test_weights_whose_rows_overlap(stride):
    x, w = torch.randn(5, 128), torch.randn(40000).as_strided((128, 128), stride)
    torch.testing.assert_close(matmul(x, w), x @ w.t(), rtol=1e-5, atol=1e-4)
