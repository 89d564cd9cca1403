"""compile_kernels.py for the adapters' kernels: `compile_lora.py <capability> <dtype> <adapters' dtype> <rank>`."""

from __future__ import annotations

import sys

import torch
from compile_kernels import recorded, report


def lora_linear(dtype: torch.dtype, adapter: torch.dtype, rank: int) -> None:
    """q, k, v of a large model: training, few rows, dropout, rows; strided, as views of a wider tensor are."""
    from riftco.kernels.lora_linear import cuda, rescale_cuda

    C, widths = 256, (256, 128, 128)
    weights = [torch.empty(N, C, dtype=dtype) for N in widths]
    a, b = ([torch.empty(*s, dtype=adapter) for s in sizes] for sizes in ([(rank, C)] * 3, [(N, rank) for N in widths]))
    base, gain = (["dense"] * 3, weights, []), torch.empty(widths[0])
    for M, seed, rows in (
        (2000, None, None),
        (700, torch.empty(1, dtype=torch.int64), None),
        (9, None, None),
        (200, torch.empty(1, dtype=torch.int64), torch.arange(9)),
    ):
        dropped = (seed, 0.1, rows)
        x = torch.empty(M, 2 * C, dtype=dtype)[:, :C]
        ys, xa = cuda.forward(x, *base, [gain, None, None], a, b, [2.0, 1.0, 0.5], *dropped)
        cuda.backward(ys, x, *base, a, b, xa, [2.0, 1.0, 0.5], *dropped, True, [False] * 3, True, True)
    rescale_cuda.backward(rescale_cuda.forward(ys[0], gain, gain), ys[0], gain, True, True)


if __name__ == "__main__":
    with recorded() as calls:
        lora_linear(getattr(torch, sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4]))
    report(calls, int(sys.argv[1]))
