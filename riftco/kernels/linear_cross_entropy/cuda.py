"""Linear + cross-entropy on CUDA: cuBLAS for the matmuls, the cross-entropy kernels for what lies between."""

import functools

import torch

from ..cross_entropy import cuda as cross_entropy
from ..cross_entropy.cuda.route import held
from . import slices
from .plan import Filled
from .problem import Problem

COLUMNS = 256  # of a tile that cuBLAS takes for many rows; outputs of less than a round of tiles it splits by itself


def filled(p: Problem, need_weight: bool) -> Filled | None:
    if p.frozen or p.C < 8 * COLUMNS or not p.x.is_cuda:  # the interpreter's tensors are on a CPU
        return None
    processors = torch.cuda.get_device_properties(p.x.device).multi_processor_count
    return Filled(-(-p.C // COLUMNS), processors, 0.5 if need_weight else 0.05)


def panel(p: Problem) -> int:
    plain = p.class_weight is None and p.label_weight is None and p.lora_a is None and not p.metrics
    if p.frozen or not plain or p.label_smoothing or p.softcap or p.x.dtype.itemsize != 2 or p.V % 16:
        return 0
    chosen = held(p.V)
    return 0 if chosen is None else 8 * chosen.T


LOSS = slices.Loss(
    cross_entropy.forward,
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    temporaries=lambda p: 0,
    vocabulary_below=600,  # at 546 rows an addition blocks of classes were 6 % faster (H200)
    in_turn=cross_entropy.Slices,
    places=cross_entropy.places,
    filled=filled,
    panel=panel,
    one_product=True,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
