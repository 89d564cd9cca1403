"""Compiles what a call of the Hopper backward for head dims above 128 would launch (see compile_hopper.py).

Run as a program in a process without TRITON_INTERPRET, with the call's options as the text of keyword arguments.
"""

from __future__ import annotations

import sys

import torch
from compile_hopper import main


def call(D=256, dtype=torch.bfloat16, packed=False, k_lens=False, left=None, right=0, softcap=0.0, start=0) -> None:
    from riftco.kernels.attention.cuda.hopper.backward_wide import backward

    lead = () if packed else (2,)
    q, k = torch.empty(*lead, 256, 4, D, dtype=dtype), torch.empty(*lead, 256, 2, D, dtype=dtype)
    lse = torch.empty(*lead, 4, 256)
    cu = torch.tensor([0, 100, 256], dtype=torch.int32) if packed else None
    lens = torch.tensor([100, 256], dtype=torch.int32) if k_lens else None
    backward(
        q, None, q, k, k, q, lse, cu, None, lens, None, None, None, None, left, right, softcap, 0.0, start, False,
        True, True, True, False, False,
    )  # fmt: skip


if __name__ == "__main__":
    options = eval(f"dict({sys.argv[1]})", {"torch": torch})  # the test's own text
    main(lambda: call(**options))
