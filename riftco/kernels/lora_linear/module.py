"""A linear layer with a LoRA adapter; the parameters carry PEFT's names."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._arguments import whole
from .._calls import sole_call
from ..embedding.module import LoRAEmbedding, LoRAOptions, SharedHead
from ..gguf_linear.module import GGUFLinear
from ..nf4.module import NF4Linear
from .checks import MAX_RANK
from .dora import rescale, weight_norm
from .op import lora_linear, lora_linear_group


class LoRALinear(LoRAOptions, nn.Module):
    """A frozen Linear, NF4Linear or GGUFLinear with a trainable adapter: y = base(x) + scale * dropout(x) A^T B^T.

    `lora_A.weight` [R, C] starts as Kaiming uniform (a = sqrt(5)), `lora_B.weight` [N, R] as zeros, so that y starts as
    base(x). scale is alpha / rank, or alpha / sqrt(rank) with `use_rslora`. Adapters are float32 unless `dtype` says
    otherwise, whatever the base's dtype, and on the base's device unless `device` says otherwise ("meta": nothing is
    allocated or drawn, for weights that are set afterwards). With `use_dora`, `lora_magnitude_vector` [N] starts as the
    norm of each row of the base's weight. State keys: base_layer.*, lora_A.weight, lora_B.weight,
    lora_magnitude_vector, as in PEFT files.

    Args:
        base: the layer [N, C]; frozen.
        rank: R, 1 to 256.
        alpha: see above.
        dropout: probability of dropping an element of the adapter's x in training mode.
        use_rslora, use_dora, dtype, device: see above.
    """

    max_rank = MAX_RANK
    lora_magnitude_vector: Tensor | None

    def __init__(
        self,
        base: nn.Linear | NF4Linear | GGUFLinear,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        whole(type(self).__name__, "rank", rank, "1 or more", least=1)
        self.base_layer = base.requires_grad_(False)
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.use_rslora, self.use_dora = use_rslora, use_dora
        device = base.weight.device if device is None else device
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        magnitude = nn.Parameter(torch.empty(base.out_features, device=device, dtype=dtype)) if use_dora else None
        self.register_parameter("lora_magnitude_vector", magnitude)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        if self.lora_magnitude_vector is not None and self.lora_magnitude_vector.device.type != "meta":
            with torch.no_grad():
                self.lora_magnitude_vector.copy_(self.weight_norm())

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    def adapter(self) -> tuple[Tensor, Tensor, float]:
        """(A, B, scale)."""
        return self.lora_A.weight, self.lora_B.weight, self.scale

    def weight_norm(self) -> Tensor:
        """||W + scale * B A|| of each row: what DoRA's magnitude is measured against."""
        return weight_norm(self.base_layer.weight, self.lora_A.weight, self.lora_B.weight, self.scale)

    def rescaled(self, z: Tensor) -> Tensor:
        """DoRA's y of z = x W^T + scale * dropout(x) A^T B^T."""
        assert self.lora_magnitude_vector is not None
        return rescale(z, self.lora_magnitude_vector / self.weight_norm(), self.base_layer.bias)

    def saves_without_result(self) -> bool:
        """As `_recompute.last_product` asks: DoRA reads the result, and so may a hook."""
        return not self.use_dora and _joins(self)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [..., C]; `rows` (int64, distinct, into the flattened rows) limits the adapter to those rows."""
        return lora_linear(
            x,
            self.base_layer.weight,
            self.lora_A.weight,
            self.lora_B.weight,
            scale=self.scale,
            bias=self.base_layer.bias,
            magnitude=self.lora_magnitude_vector,
            dropout_p=self.dropout,
            training=self.training,
            rows=rows,
        )


class TiedLoRALinear(SharedHead):
    """The head of a tied model whose embedding carries a LoRAEmbedding: the same adapter, the other way round.

    y = base(x) + scale * dropout(x) B A, with the embedding's A [R, V] and B [C, R], which stay its own and get both
    gradients. `base` is the frozen head over the shared weight.
    """

    def __init__(self, base: nn.Linear | GGUFLinear, embedding: LoRAEmbedding):
        if embedding.use_dora:
            raise ValueError("TiedLoRALinear: a DoRA cannot be shared: rows and columns have magnitudes of their own")
        super().__init__(base, embedding)

    @property
    def embedding(self) -> LoRAEmbedding:
        return self._owner[0]

    @property
    def dropout(self) -> float:
        return self.embedding.dropout

    def adapter(self) -> tuple[Tensor, Tensor, float]:
        """(A, B, scale) as LoRALinear's: views of the embedding's."""
        owner = self.embedding
        return owner.lora_embedding_B.t(), owner.lora_embedding_A.t(), owner.scale

    def forward(self, x: Tensor) -> Tensor:
        a, b, scale = self.adapter()
        base = self.base_layer
        return lora_linear(
            x, base.weight, a, b, scale=scale, bias=base.bias, dropout_p=self.dropout, training=self.training
        )


def linear_group(x: Tensor, layers: Sequence[nn.Module], rows: Tensor | None = None) -> tuple[Tensor, ...]:
    """Every layer's output for one x (q, k, v; gate, up): the LoRALinear among them as one call, which keeps x once.

    The same numbers as the layers called one by one, but that a group's members share the dropout mask of x, and that
    d_x is made as one. Layers with hooks, or with another dropout than most, are called by themselves.

    Args:
        x: [..., C].
        layers: modules of C inputs, of any kind.
        rows: as in LoRALinear.forward, for all LoRALinear.

    Returns:
        One [..., N] for each layer, in their order.
    """
    together = [layer for layer in layers if isinstance(layer, LoRALinear) and _joins(layer)]
    options = [_options(layer) for layer in together]
    alike = [sum(own == other for other in options) for own in options]
    together = [layer for layer, own in zip(together, options) if own == options[alike.index(max(alike))]]
    if len(together) < 2 or (rows is not None and together[0].use_dora):
        return tuple(_alone(x, layer, rows) for layer in layers)
    dora, bases = together[0].use_dora, [layer.base_layer for layer in together]
    ys = lora_linear_group(
        x,
        [base.weight for base in bases],
        [layer.lora_A.weight for layer in together],
        [layer.lora_B.weight for layer in together],
        scales=[layer.scale for layer in together],
        biases=None if dora else [base.bias for base in bases],
        dropout_p=together[0].dropout,
        training=together[0].training,
        rows=rows,
    )
    if dora:
        ys = tuple(layer.rescaled(y) for y, layer in zip(ys, together))
    done = dict(zip(map(id, together), ys))
    return tuple(done[id(layer)] if id(layer) in done else _alone(x, layer, rows) for layer in layers)


def _alone(x: Tensor, layer: nn.Module, rows: Tensor | None) -> Tensor:
    return layer(x, rows) if rows is not None and isinstance(layer, LoRALinear) else layer(x)


def _joins(layer: LoRALinear) -> bool:
    """Whether nobody watches the layer's call: a hook, or a changed forward, must see its own layer."""
    return sole_call(layer, LoRALinear)


def _options(layer: LoRALinear) -> tuple:
    return layer.dropout, layer.training, layer.use_dora
