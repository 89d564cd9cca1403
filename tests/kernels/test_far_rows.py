"""Contract A16.2: rows further apart than a signed 32-bit number of elements, in memory that nobody touches."""

import pytest
import support
import torch

from riftco import functional as F

APART = 1 << 30  # elements: the third row begins where 32 bits end
DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))


def far(rows, device):
    """Rows [3, 1, C] in 16 bit, each APART elements behind the one before."""
    n, C = rows.shape[0], rows.shape[-1]
    memory = torch.empty((n - 1) * APART + C, dtype=torch.bfloat16, device=device)  # what is not written is not there
    return memory.as_strided((n, 1, C), (APART, C, 1)).copy_(rows)


def norm(x):
    return F.rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))


def gate(x):
    return F.swiglu(x, x)


def rotate(x):
    angle = torch.linspace(0, 1, x.shape[1] * x.shape[2] // 2, device=x.device).view(x.shape[1], -1)
    return F.rope(x[:, :, None], x[:, :, None], angle.cos(), angle.sin())[0][:, :, 0]


def classes(x):
    return F.cross_entropy(x, torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device), reduction="none")[
        ..., None
    ]


def attend(x):
    return F.attention(x[None], x[None], x[None], causal=True)[0]


def sliced(x):
    head = torch.linspace(-1, 1, 5 * x.shape[-1], device=x.device).view(5, -1).bfloat16()
    target = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    return F.linear_cross_entropy(x, head, target, reduction="none")[..., None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [norm, gate, rotate, classes, attend, sliced])
def test_rows_far_apart(op, device):
    """Forward and backward, with an upstream that lies apart too: the bits of the same rows side by side."""
    on = device.torch_device
    rows, upstream = (torch.randn(3, 1, 32, device=on).bfloat16() for _ in range(2))
    results = []
    for apart in (False, True):
        x = far(rows, on).requires_grad_() if apart else rows.clone().requires_grad_()
        with device.use():
            out = op(x)
            d = upstream[..., : out.shape[-1]].to(out.dtype)
            d = far(d, on) if apart and d.dtype == torch.bfloat16 else d.contiguous()
            results.append((out.detach(), torch.autograd.grad(out, x, d)[0]))
    for near, apart in zip(*results):
        assert near.isfinite().all() and torch.equal(near, apart)


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_of_more_rows_than_32_bits_reach(device):
    """Rows of an embedding behind element 2^31, taken and put there."""
    C = 1 << 16
    table = torch.empty(2 * APART // C + 2, C, dtype=torch.bfloat16, device=device.torch_device)
    last, rows = len(table) - 1, torch.randn(2, C, device=device.torch_device).bfloat16()
    table[last], table[0] = rows
    ids = torch.tensor([last, 0], device=device.torch_device)
    with device.use():
        assert torch.equal(F.embedding(ids, table), rows)
        assert torch.equal(F.gather_rows(table, ids), rows)
