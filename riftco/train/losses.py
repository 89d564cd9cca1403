"""Preference and reinforcement losses on the log-probability of each token. B sequences of T tokens, V classes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import per_token_logprobs


def dpo_loss(
    logits: Tensor, target: Tensor, reference: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Direct preference optimisation over B pairs: the first B sequences are chosen, the last B rejected.

    Args:
        logits: [2 B, T, V], floating. Differentiable.
        target: [2 B, T], int32 or int64; negative where a token does not count.
        reference: [2 B] float32, each sequence's summed log-probability under the reference model, in nats.
        beta: how much a preference weighs against the distance to the reference.
        label_smoothing: the part of the pairs that are taken to be the wrong way round.

    Returns:
        The mean loss, and the rewards beta * (log p - reference) [2 B], detached.

    Raises:
        ValueError: what `per_token_logprobs` refuses.

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7; smoothing: Mitchell 2023.
    """
    rewards = beta * (per_token_logprobs(logits, target).sum(-1) - reference)
    chosen, rejected = rewards.chunk(2)
    margin = chosen - rejected
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return loss.mean(), rewards.detach()


def grpo_loss(
    logits: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    beta: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
    temperature: float = 1.0,
) -> Tensor:
    """Group relative policy optimisation: the clipped policy loss, averaged over the tokens that count.

    Args:
        logits: [B, T, V], floating. Differentiable.
        target: [B, T], int32 or int64; negative where a token does not count.
        advantages: [B], each sequence's reward less its group's mean, scaled as the caller wants.
        old, reference: [B, T] log-probabilities under the sampling policy (None: this one) and the reference model.
        beta: coefficient of the estimated KL divergence to the reference.
        clip: how far below and above 1 the ratio still counts.
        temperature: positive; logits are divided by it.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: what `per_token_logprobs` refuses.

    Source: Shao et al. 2024, "DeepSeekMath", equations 3 and 4.
    """
    counts = target >= 0
    log_p = per_token_logprobs(logits, target, temperature=temperature)
    ratio = (log_p - (log_p.detach() if old is None else old)).exp()
    gain = advantages.unsqueeze(-1)
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip[0], 1 + clip[1]) * gain)
    if reference is not None:
        gap = reference - log_p
        loss = loss + beta * (gap.expm1() - gap)  # of a small gap half its square, far below the last digit of 1
    return torch.where(counts, loss, 0.0).sum() / counts.sum().clamp(min=1)
