"""The sliced head as XLA runs it: one graph that never holds the logits of all rows."""

import re

import pytest
import support
import torch
from xla_graph import recorded

from riftco.functional import linear_cross_entropy

N, C, V, ROWS = 512, 16, 4096, 64


@pytest.mark.xla
@pytest.mark.parametrize("device", support.device_params(("xla",)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_no_logits_of_all_rows(device, dtype, trains):
    """Forward and backward of one graph: slices of at most 64 rows and nothing of N x V, whatever its layout."""
    import torch_xla

    x = torch.randn(N, C, dtype=dtype).to("xla").requires_grad_()
    weight = torch.randn(V, C, dtype=dtype).to("xla").requires_grad_(trains)
    target = torch.randint(V, (N,)).to("xla")
    each = V * (4 + 2 * dtype.itemsize)  # a row of logits, their gradient, and a float32 copy that is not fused away
    with recorded() as record:
        loss = linear_cross_entropy(x, weight, target, slice_bytes=ROWS * each)
        grads = torch.autograd.grad(loss, (x, weight) if trains else (x,))
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss, *grads])
    assert (record.compiles, record.executions, record.fallbacks) == (1, 1, [])
    sizes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"\w+\[([\d,]+)\]", hlo)]
    sliced = [size[0] for size in sizes if size[1:] == [V]]
    assert any(ROWS // 2 < rows <= ROWS for rows in sliced), "the slices are where they are looked for"
    assert max(torch.Size(size).numel() for size in sizes) <= ROWS * V
