"""The inputs and options of one call, in the order of the ops' schemas. Torch-only."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._contract import meaning
from .._frozen_weight import DENSE, Base, arity

__all__ = ["OPTIONS", "TENSORS", "Problem", "meaning"]

TENSORS = (
    "Tensor x, Tensor weight, Tensor? absmax, Tensor target, Tensor? bias, Tensor? row_weight, Tensor? class_weight, "
    "Tensor? label_weight, Tensor? lora_a, Tensor? lora_b"
)
OPTIONS = (
    "SymInt V, str kind, int block_size, float lora_scale, int ignore_index, float label_smoothing, float z_loss, "
    "float softcap, float logit_scale, bool metrics, int slice_bytes, SymInt? n_labelled"
)


class Problem(NamedTuple):
    """One call of the ops. C hidden size, V vocabulary, R adapter rank, k labels a row; rows: x's leading dimensions.

    `kind` is "dense" or a frozen weight's (see _frozen_weight), whose packed bytes `weight` then holds: NF4's with
    absmax and block_size. With label_weight [..., k], `target` is [..., k].
    slice_bytes and n_labelled say how much work is done at once and on which rows; they do not change the meaning.
    """

    x: Tensor
    weight: Tensor
    absmax: Tensor | None
    target: Tensor
    bias: Tensor | None
    row_weight: Tensor | None
    class_weight: Tensor | None
    label_weight: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    V: int
    kind: str
    block_size: int
    lora_scale: float
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    logit_scale: float
    metrics: bool
    slice_bytes: int
    n_labelled: int | None

    @property
    def rows(self) -> torch.Size:
        return self.x.shape[:-1]

    @property
    def C(self) -> int:
        return self.x.shape[-1]

    @property
    def frozen(self) -> bool:
        """Whether the head is held in a format of its own."""
        return self.kind != DENSE

    @property
    def base(self) -> Base:
        """The head as its product takes it."""
        tensors, integers = arity(self.kind)
        held = [t for t in (self.weight, self.absmax) if t is not None]
        return Base(self.kind, held[:tensors], [self.V, self.C, self.block_size][:integers])

    @property
    def acc(self) -> torch.dtype:
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    @property
    def options(self) -> tuple[int, float, float, float, float]:
        """What the launchers of cross_entropy call OPTIONS."""
        return self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.logit_scale

    def weight_grad_dtype(self, accum_dtype: torch.dtype) -> torch.dtype:
        """The weight's own, except in float16: a sum over thousands of rows, not yet divided, may not fit there."""
        return torch.promote_types(self.x.dtype, accum_dtype) if self.x.dtype == torch.float16 else self.x.dtype

    def live(self) -> Tensor:
        """The rows that carry loss: a label, and a weight that is not 0."""
        labelled = (self.target != self.ignore_index) & (self.target >= 0)
        if self.label_weight is not None:
            labelled = (labelled & (self.label_weight != 0)).any(-1)
        return labelled if self.row_weight is None else labelled & (self.row_weight != 0)
