"""Preference and reinforcement losses against their formulas in float64."""

import pytest
import torch
import torch.nn.functional as F

from riftco.train.losses import dpo_loss, grpo_loss


def make(B=4, T=6, V=13):
    torch.manual_seed(0)
    x = torch.randn(B, T, V, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, V, (B, T))
    y[0, :2] = y[2, -1] = -100
    log_p = x.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y >= 0)
    return x, y, log_p


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(smoothing):
    x, y, log_p = make()
    reference = torch.randn(4, dtype=torch.float64)
    loss, rewards = dpo_loss(x, y, reference, beta=0.3, label_smoothing=smoothing)
    r = 0.3 * (log_p.sum(-1) - reference)
    margin = r[:2] - r[2:]
    want = (-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)).mean()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(rewards, r.detach())
    assert not rewards.requires_grad
    torch.testing.assert_close(*(torch.autograd.grad(t, x)[0] for t in (loss, want)))


@pytest.mark.parametrize("known", [False, True])
def test_grpo(known):
    x, y, log_p = make()
    live = y >= 0
    gain = torch.tensor([1.0, -2.0, 0.5, -0.1], dtype=torch.float64)
    old = log_p.detach() + 0.5 * torch.randn_like(log_p) if known else None
    reference = log_p.detach() + 0.1 if known else None
    loss = grpo_loss(x, y, gain, old=old, reference=reference, beta=0.2, clip=(0.2, 0.3))
    ratio = (log_p - (old if known else log_p.detach())).exp()
    each = -torch.minimum(ratio * gain[:, None], ratio.clamp(0.8, 1.3) * gain[:, None])
    if known:
        gap = reference - log_p
        each = each + 0.2 * (gap.exp() - gap - 1)
    want = each[live].mean()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, x)[0] for t in (loss, want)))
    assert grpo_loss(x, torch.full_like(y, -1), gain).item() == 0
