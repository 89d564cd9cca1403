"""Linear + cross-entropy on CUDA: cuBLAS for the matmuls, the cross-entropy kernels for what lies between."""

import functools

import torch

from ..cross_entropy import cuda as cross_entropy
from . import slices
from .plan import Filled
from .problem import Problem

COLUMNS = 256  # of a tile that cuBLAS takes for many rows; outputs of less than a round of tiles it splits by itself


def filled(p: Problem, need_weight: bool) -> Filled | None:
    if p.frozen or p.C < 8 * COLUMNS or not p.x.is_cuda:  # the interpreter's tensors are on a CPU
        return None
    processors = torch.cuda.get_device_properties(p.x.device).multi_processor_count
    return Filled(-(-p.C // COLUMNS), processors, 0.5 if need_weight else 0.05)


LOSS = slices.Loss(
    cross_entropy.forward,
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    temporaries=lambda p: 0,
    vocabulary_below=512,  # from a prototype's times of the sums, not yet measured here
    in_turn=cross_entropy.Slices,
    places=cross_entropy.places,
    filled=filled,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
