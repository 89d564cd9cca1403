"""A linear layer with a LoRA adapter; the parameters carry PEFT's names."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..nf4.module import NF4Linear
from .op import MAX_RANK, lora_linear


class LoRALinear(nn.Module):
    """A frozen Linear or NF4Linear with a trainable adapter: y = base(x) + scale * dropout(x) A^T B^T.

    `lora_A.weight` [R, C] starts as Kaiming uniform (a = sqrt(5)), `lora_B.weight` [N, R] as zeros, so that y starts as
    base(x). scale is alpha / rank, or alpha / sqrt(rank) with `use_rslora`. Adapters are float32 unless `dtype` says
    otherwise, whatever the base's dtype. State keys: base_layer.*, lora_A.weight, lora_B.weight, as in PEFT files.
    """

    max_rank = MAX_RANK

    def __init__(
        self,
        base: nn.Linear | NF4Linear,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        use_rslora: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.rank, self.alpha, self.dropout, self.use_rslora = rank, alpha, dropout, use_rslora
        device = base.weight.device
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [..., C]; `rows` (int64, distinct, into the flattened rows) limits the adapter to those rows."""
        return lora_linear(
            x,
            self.base_layer.weight,
            self.lora_A.weight,
            self.lora_B.weight,
            scale=self.scale,
            bias=self.base_layer.bias,
            dropout_p=self.dropout,
            training=self.training,
            rows=rows,
        )

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}, use_rslora={self.use_rslora}"
