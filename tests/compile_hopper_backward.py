"""Compiles the kernels that a call of the Hopper backward would launch; see compile_hopper.py for what it prints."""

from __future__ import annotations

import sys

import compile_hopper
import torch


def call(dtype=torch.bfloat16, D=128, packed=False, right=0, left=None, softcap=0.0, start=0, deterministic=False,
         need=(True, True, True)) -> None:  # fmt: skip
    from riftco.kernels.attention.cuda.hopper import backward as room

    room._programs = lambda device: 132

    lead = () if packed else (2,)
    q, k = torch.empty(*lead, 256, 4, D, dtype=dtype), torch.empty(*lead, 256, 2, D, dtype=dtype)
    cu = torch.tensor([0, 100, 256], dtype=torch.int32) if packed else None
    lse = torch.empty(*lead, 4, 256)
    room.backward(
        q, None, q, k, k, q, lse, cu, None, None, None, None, None, None, left, right, softcap, 0.0, start,
        deterministic, *need, False, False,
    )  # fmt: skip


if __name__ == "__main__":
    compile_hopper.main(lambda: call(**eval(f"dict({sys.argv[1]})")))
