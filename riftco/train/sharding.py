"""Weights cut over the processes of a run (FSDP2): each block is gathered when it computes, and let go of behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..models import Decoder
from ..nn import GGUFEmbedding, GGUFLinear, NF4Linear, NF4ParameterLinear
from .ranks import Ranks


class Sharded(nn.Module):
    """A Decoder whose parameters are cut over the processes: what it computes is called through this module.

    Everything in the blocks is gathered block by block, embedding, head and last norm for the whole of a step.
    Parameters that are trained beside frozen ones (adapters) stay whole in every process.

    Args:
        model: changed in place; its frozen NF4 weights are cut as they are, codes and scales.
        ranks: the processes.

    Raises:
        ValueError: weights that are kept in GGUF's blocks.
    """

    sharded = True

    def __init__(self, model: Decoder, ranks: Ranks):
        super().__init__()
        for name, layer in list(model.named_modules()):
            if isinstance(layer, (GGUFLinear, GGUFEmbedding)):
                raise ValueError(f"{name} is held in GGUF's blocks, which are not cut over processes; use nf4 or bf16")
            if type(layer) is NF4Linear:
                model.set_submodule(name, NF4ParameterLinear(layer))
        self.model = model
        frozen = any(not p.requires_grad for p in model.parameters())
        whole = {p for p in model.parameters() if p.requires_grad} if frozen else set()
        for p in whole:
            p.data = p.data.to(ranks.device)
        for module in model.modules():  # buffers are not cut
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(ranks.device)
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        how: dict[str, Any] = {
            "mesh": mesh,
            "ignored_params": whole,
            # gradients of 16 bit are summed in float32 and rounded once
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32 if model.dtype.itemsize == 2 else None),
        }
        for layer in model.model.layers:
            fully_shard(layer, **how)
        fully_shard(self, **how)
        for part in self.modules():
            if isinstance(part, FSDPModule):  # sums, as the loss is divided by what all processes have together
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def forward(self, compute: Callable[[Decoder], Any]) -> Any:
        return compute(self.model)

    def __getattr__(self, name: str) -> Any:
        """What is no module's is the Decoder's own: config, lm_head, attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def loss(self, *arguments, **options) -> Tensor:
        return self(lambda model: model.loss(*arguments, **options))

    def head_loss(self, *arguments, **options) -> Tensor:
        return self(lambda model: model.head_loss(*arguments, **options))

    def hidden(self, *arguments, **options) -> Tensor:
        return self(lambda model: model.hidden(*arguments, **options))

    def logits(self, hidden: Tensor) -> Tensor:
        return self(lambda model: model.logits(hidden))
