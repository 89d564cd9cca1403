"""torch.nn.Embedding with a gradient that is summed in a fixed order."""

import torch
from torch import Tensor

from .op import embedding


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding's arguments, state_dict and initialisation; `sparse=True` is refused by name."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.sparse:
            raise ValueError("Embedding: sparse=True is not supported; gradients are dense")

    def forward(self, input: Tensor) -> Tensor:
        return embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        )  # fmt: skip
