"""Compiles gguf_linear's kernel of one to four rows for a GPU that need not be there: python compile_gguf_row.py
<capability> <dtype>, without TRITON_INTERPRET.

Prints a line a kernel: format, rows, shared memory, bytes spilled a thread, HMMA instructions a lane's unit takes, and
how lanes lie: "apart" where every load gives lane l of each warp the elements whose first index is l modulo 32, of
which the sums on the matrix unit are made, and nothing is moved between lanes but the results.
"""

import re
import sys

import compile_kernels
import torch

from riftco.kernels.gguf_linear import cuda
from riftco.kernels.gguf_linear.formats import FORMATS

N, K = 4096, 4096


def lanes(ttgir: str) -> str:
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>$", ttgir, re.M))
    loads = {
        layouts[name] for first, name in re.findall(r"tt\.load .*: tensor<(\d+)x.*, (#\w+)> loc", ttgir) if first != "1"
    }
    apart = re.compile(r"sizePerThread = \[1, 1, 1\], threadsPerWarp = \[32, 1, 1\], warpsPerCTA = \[\d+, 1, 1\], .*")
    moved = re.findall(r"ttg\.convert_layout .*: tensor<(\d+)x", ttgir)
    return "apart" if loads and all(map(apart.fullmatch, loads)) and all(int(n) < 32 for n in moved) else "mixed"


def main(capability: int, dtype: torch.dtype) -> None:
    for f in FORMATS.values():
        packed = torch.empty(N, f.row_bytes(K), dtype=torch.uint8)
        for M in (1, 2, 4):
            with compile_kernels.recorded() as calls:
                cuda.forward(torch.empty(M, K, dtype=dtype), packed, torch.empty(N, dtype=dtype), f.name, N, K)
            (call,) = calls
            done = compile_kernels.compiled(*call, capability)
            spilled = compile_kernels.spilled_bytes(done.asm["ptx"], capability)
            matrix = done.asm["ptx"].count("mma.sync")
            print(f.name, M, done.metadata.shared, spilled, matrix, lanes(done.asm["ttgir"]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]))
