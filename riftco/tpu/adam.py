"""The Adam step for XLA: the spec, whose writes run above PyTorch's dispatcher, with a norm of its own.

torch_xla mistakes the shape of amax() over all dimensions, and XLA's maximum may pass over a NaN.
"""

import torch
from torch import Tensor

from ..kernels.adam import spec

step, advance = spec.step, spec.advance


def norm(grads: list[Tensor], clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
    acc = spec.accumulation_dtype(grads)
    live = [g.flatten() for g in grads if g.numel()]
    if not live:
        zero = grads[0].new_zeros((), dtype=acc)
        return spec.finish(zero, zero, clip)
    finite = torch.stack([g.isfinite().all() for g in live]).all(0)
    highest = torch.stack([g.abs().amax(0).to(acc) for g in live]).amax(0)
    largest = torch.where(finite, highest, torch.stack([g.abs().sum(dtype=acc) for g in live]).sum(0))
    unit = torch.where(largest > 0, largest, 1.0)
    return spec.finish(largest, torch.stack([(g.to(acc) / unit).square().sum() for g in live]).sum(), clip)
