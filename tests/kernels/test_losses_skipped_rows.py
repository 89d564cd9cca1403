"""Rows that carry no loss are skipped: their logits, or their x, lie in memory that cannot be read."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import support

CODE = """
import ctypes, mmap, sys
import torch
from riftco.functional import cross_entropy, linear_cross_entropy
from riftco.kernels._contract import implementation
loss, impl, touch = sys.argv[1:]
V = mmap.PAGESIZE // 4
memory = mmap.mmap(-1, 6 * mmap.PAGESIZE)
x = torch.frombuffer(memory, dtype=torch.float32).view(6, V)  # a row a page
x.copy_(torch.randn(6, V))
weight = torch.randn(50, V)
y, w = torch.randint(0, 50, (6,)), torch.ones(6)
w[1], y[4] = 0, -100
options = dict(label_smoothing=0.1, z_loss=0.1, softcap=9.0)
kept = [0, 2, 3, 5]
def run(x, weight, y, w, reduction):
    if loss == "linear_cross_entropy":
        return linear_cross_entropy(x, weight, y, row_weight=w, reduction=reduction, slice_bytes=900, **options)
    return cross_entropy(x, y, row_weight=w, reduction=reduction, **options) + 0 * weight.sum()
def grads(loss, *leaves):
    return torch.autograd.grad(loss.sum(), leaves)
leaves = [x.requires_grad_(), weight.requires_grad_()]
small = [x.detach()[kept].clone().requires_grad_(), weight]
with implementation(impl if impl != "cpu" else None):
    for reduction in ("sum", "none"):
        want = grads(run(*small, y[kept], w[kept], reduction), *small)
        for row in (1, 4):
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(x[row].data_ptr()), mmap.PAGESIZE, 0) == 0
        got = grads(run(*leaves, y, w, reduction), *leaves)
        torch.testing.assert_close(got[0][kept], want[0])
        torch.testing.assert_close(got[1], want[1])
        assert got[0][1].abs().sum() == got[0][4].abs().sum() == 0
        if touch == "touch":
            x[1].sum().item()
        for row in (1, 4):
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(x[row].data_ptr()), mmap.PAGESIZE, 3) == 0
"""


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
@pytest.mark.parametrize("touch", ["leave", "touch"])
@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton")))
def test_skipped_rows_are_not_read(device, loss, touch):
    """In a process of its own, which a read of such a row ends; that it does is seen where one is read on purpose."""
    root = pathlib.Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, loss, device.impl or "cpu", touch]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if touch == "touch":
        assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS), done.stderr
    else:
        assert done.returncode == 0, done.stderr
