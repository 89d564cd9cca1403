"""An NF4Linear whose codes and scales are parameters: what shards parameters (FSDP2) then shards them, bit for bit."""

from __future__ import annotations

import torch
from torch import nn

from .module import NF4Linear
from .weight import NF4Weight


class NF4ParameterLinear(NF4Linear):
    """The layer's 4-bit weight as two frozen parameters, `codes` (bytes) and `scale` (float32, one a block).

    Two bytes of codes are named a bfloat16, as nothing computes with them: FSDP2 of torch 2.11 makes of each part a
    parameter that could learn, which torch refuses to integers, and not every backend gathers float8.

    `weight` is an NF4Weight over what they are at the moment, so that a gathered weight is used where it lies. A second
    level of scales is expanded: 4.5 bits a weight. For training only: the state_dict is not bitsandbytes'.
    """

    def __init__(self, layer: NF4Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight
        self.shape, self.block_size, self.held_dtype = tuple(weight.shape), weight.block_size, weight.dtype
        codes = weight.codes.view(-1)
        self.length = codes.numel()
        pairs = nn.functional.pad(codes, (0, self.length % 2)).view(torch.bfloat16)
        self.codes = nn.Parameter(pairs, requires_grad=False)
        self.scale = nn.Parameter(weight.scale, requires_grad=False)
        self.bias = layer.bias
        self.train(layer.training)

    @property
    def weight(self) -> NF4Weight:  # type: ignore[override]
        codes, scale = self.codes.detach().view(torch.uint8)[: self.length], self.scale.detach()
        return NF4Weight(codes.view(-1, 1), scale, self.shape, self.block_size, self.held_dtype)

    def _apply(self, fn, recurse=True):
        """Moves, but casts neither part."""

        def kept(t: torch.Tensor) -> torch.Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return nn.Module._apply(self, kept, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments):
        nn.Module._load_from_state_dict(self, *arguments)
