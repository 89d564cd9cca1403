"""Attention as XLA runs it: every option over several blocks of keys, and no T x S matrix in the graph."""

import re

import pytest
import support
import torch
from xla_graph import recorded

from riftco.functional import attention
from riftco.kernels.attention import cases
from riftco.tpu import attention as launcher

pytestmark = pytest.mark.xla
XLA = support.device_params(("xla",))


@pytest.mark.parametrize("device", XLA)
@pytest.mark.parametrize("case", cases.OPTION_CASES, ids=lambda c: c.name)
def test_options_over_several_blocks(case, device, monkeypatch):
    monkeypatch.setattr(launcher, "KEYS", 16)
    support.check_case(cases, case, torch.float32, device)


@pytest.mark.parametrize("device", XLA)
def test_no_matrix_of_all_scores(device):
    import torch_xla

    T = 2 * launcher.KEYS + 64
    q, k, v = (torch.randn(1, T, 1, 8).to("xla").requires_grad_() for _ in range(3))
    bias = torch.randn(1, 1, 1, T).to("xla").requires_grad_()
    for options in ({}, {"bias": bias, "softcap": 2.0, "dropout_p": 0.5, "window": (T - 1, None)}):
        leaves = (q, k, v, *(t for t in (options.get("bias"),) if t is not None))
        with recorded() as record:
            out = attention(q, k, v, causal=True, **options)
            grads = torch.autograd.grad(out.sum(), leaves)
            hlo = torch_xla._XLAC._get_xla_tensors_hlo([out, *grads])
        assert (record.compiles, record.executions, record.fallbacks) == (1, 1, [])
        assert re.search(rf"f32\[1,1,(1,)?{T},{launcher.KEYS}\]", hlo), "the blocks are where they are looked for"
        assert not re.search(rf"{T},{T}[\],]", hlo)
