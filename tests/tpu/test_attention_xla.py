"""Attention as XLA runs it: several blocks of keys against the spec, and a graph that holds no T x S matrix."""

import re

import pytest
import support
import torch
from xla_graph import recorded

from riftco.functional import attention
from riftco.kernels.attention import cases, spec
from riftco.tpu import attention as launcher


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("keys", [7, 16])
def test_blocks_of_keys_are_the_spec(case, keys, monkeypatch):
    """The launcher is plain torch: in float64 on the CPU it must give what the spec gives, block by block."""
    monkeypatch.setattr(launcher, "KEYS", keys)
    inputs = cases.make_inputs(case, torch.Generator().manual_seed(0))
    q, k, v, cu_q, cu_k = (inputs.get(n) for n in ("q", "k", "v", "cu_q", "cu_k"))
    options = bool(case.options.get("causal")), case.options.get("scale")
    out, lse = launcher.forward(q, k, v, cu_q, cu_k, *options)
    want_out, want_lse = spec.forward(q, k, v, cu_q, cu_k, *options)
    torch.testing.assert_close((out, lse), (want_out, want_lse))
    d_out = torch.randn_like(out)
    saved = (d_out, q, k, v, out, lse, cu_q, cu_k, *options)
    want = spec.backward(*saved, True, True, True)
    torch.testing.assert_close(launcher.backward(*saved, True, True, True), want)
    for i, need in enumerate([(True, False, False), (False, True, False), (False, False, True)]):
        only = launcher.backward(*saved, *need)
        torch.testing.assert_close(only[i], want[i])
        assert all(t.numel() == 0 for j, t in enumerate(only) if j != i)


@pytest.mark.xla
@pytest.mark.parametrize("device", support.device_params(("xla",)))
def test_no_matrix_of_all_scores(device):
    import torch_xla

    T = 2 * launcher.KEYS + 64
    q, k, v = (torch.randn(1, T, 1, 8).to("xla").requires_grad_() for _ in range(3))
    with recorded() as record:
        out = attention(q, k, v, causal=True)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([out, *grads])
    assert (record.compiles, record.executions, record.fallbacks) == (1, 1, [])
    assert re.search(rf"f32\[1,1,{T},{launcher.KEYS}\]", hlo), "the blocks are where they are looked for"
    assert not re.search(rf"{T},{T}[\],]", hlo)
