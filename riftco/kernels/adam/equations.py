"""Adam's equations for elements of one tensor, in plain torch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One update of one tensor, called with elements of it. Tensors are scalars on the device."""

    step: Tensor  # counted already
    committed: Tensor
    clip_scale: Tensor
    lr: Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    def __call__(self, p: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> None:
        """g = clip_scale * grad (+ weight_decay * p unless decoupled); m += (1 - beta1) (g - m);
        v = beta2 v + (1 - beta2) g^2; p = p (1 - lr weight_decay, if decoupled)
        - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), in place and in the moments' dtype.
        Nothing changes unless the step is committed.
        """
        acc = m.dtype
        old, g = p.to(acc), self.clip_scale.to(acc) * grad.to(acc)
        if not self.decoupled:
            g = g + self.weight_decay * old
        new_m = m + (1 - self.beta1) * (g - m)
        new_v = self.beta2 * v + (1 - self.beta2) * g * g
        new = old * (1 - self.lr * self.weight_decay) if self.decoupled else old
        below = new_v.sqrt() / self._correction(self.beta2).sqrt() + self.eps
        new = new - self.lr / self._correction(self.beta1) * new_m / below
        for stored, value in ((p, new), (m, new_m), (v, new_v)):
            stored.copy_(torch.where(self.committed, value.to(stored.dtype), stored))

    def _correction(self, beta: float) -> Tensor:
        """1 - beta^t, by expm1, as 1 - 0.999 in float32 keeps only five digits."""
        # a refused first step would divide by 1 - beta^0; its result is not stored
        count = torch.where(self.committed, self.step, 1.0)
        return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
