"""The materialised route gives what flash gives, with every option; what each keeps for the backward."""

import pytest
import support
import torch

from riftco.functional import attention
from riftco.kernels._check import inputs_of, loss_on, outputs_and_grads, to, within_budget
from riftco.kernels.attention import cases
from riftco.kernels.attention.masked_softmax import masked_softmax

DEVICES = support.device_params(("cpu", "mps-emulated", "cuda"))


def materialized(inputs, case):
    return cases.call(inputs, case, "materialized")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_materialized_is_the_spec(case, dtype, device):
    """By the budget that flash has."""
    inputs = inputs_of(cases, case, dtype)
    oracle = outputs_and_grads(cases.reference, cases, case, to(inputs, torch.float64, "cpu"))
    near = outputs_and_grads(cases.reference, cases, case, to(inputs, torch.float32, "cpu"))
    with device.use():
        got = outputs_and_grads(materialized, cases, case, to(inputs, dtype, device.torch_device))
    for name in oracle:
        roundings, loss = cases.ROUNDINGS.get(name, 0), loss_on(device.torch_device)
        within_budget(name, got[name], oracle[name], near[name], dtype, roundings, loss=loss)


def test_what_is_kept():
    """Probabilities [B, H, T, S] against lse [B, H, T]."""
    q, k, v = (torch.randn(1, 64, h, 8, requires_grad=True) for h in (4, 2, 2))
    kept = {}
    for impl in ("flash", "materialized"):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            attention(q, k, v, causal=True, impl=impl)
        kept[impl] = max(sizes)
    assert kept == {"flash": q.numel(), "materialized": 4 * 64 * 64}


def test_double_backward():
    leaves = [torch.randn(1, 4, h, 3, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, sinks):
        return attention(q, k, v, causal=True, window=(2, 0), sinks=sinks, softcap=2.0, impl="materialized")

    assert torch.autograd.gradcheck(run, (*leaves, sinks))
    assert torch.autograd.gradgradcheck(run, (*leaves, sinks))


def test_masked_softmax_is_twice_differentiable():
    """p and lse, of strided rows and of one that is -inf alone."""
    s = torch.randn(5, 3, 4, dtype=torch.float64).permute(2, 0, 1)
    s[1, 2] = -torch.inf
    live = torch.ones(4, 5, dtype=torch.bool)
    live[1, 2] = False

    def run(given, lse_too):
        p, lse = masked_softmax(torch.where(live[..., None], given, -torch.inf), True)
        return (p, lse[live]) if lse_too else p

    leaf = s.nan_to_num(0.0, 0.0, 0.0).requires_grad_()
    for lse_too in (False, True):
        assert torch.autograd.gradcheck(lambda t, w=lse_too: run(t, w), leaf)
        assert torch.autograd.gradgradcheck(lambda t, w=lse_too: run(t, w), leaf)
    p, lse = masked_softmax(s.requires_grad_(), True)
    (d_s,) = torch.autograd.grad((p, lse), s, (torch.ones_like(p), torch.full_like(lse, torch.nan)))
    assert not p[1, 2].any() and lse[1, 2] == -torch.inf and not d_s[1, 2].any()
    assert torch.equal(p.detach()[live], s.detach().softmax(-1)[live])


def test_rows_that_see_nothing():
    q, k, v = (torch.randn(1, n, 1, 8, requires_grad=True) for n in (5, 3, 3))
    out, lse = attention(q, k, v, causal=True, return_lse=True, impl="materialized")
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -torch.inf).all() and (grads[0][:, :2] == 0).all()
    assert all(g.isfinite().all() for g in grads)
