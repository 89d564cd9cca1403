"""Launches csrc/metal/attention_softmax.metal; the contract is riftco/kernels/attention/masked_softmax.py."""

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from . import launch


def forward(s: Tensor, need_lse: bool) -> tuple[Tensor, Tensor]:
    p = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    lse = torch.empty(s.shape[:-1] if need_lse else 0, dtype=torch.float32, device=s.device)
    if s.numel() == 0:
        return p, lse.fill_(-torch.inf)
    _launch("fwd", [p, lse], s, [], need_lse)
    return p, lse


def backward(d_p: Tensor, d_lse: Tensor | None, p: Tensor) -> Tensor:
    d_s = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    if d_s.numel():
        upstream = None if d_lse is None else d_lse.contiguous()
        _launch("bwd", [d_s], d_p, [upstream, p.contiguous()], d_lse is not None)
    return d_s


def _launch(kernel: str, outputs: list[Tensor], t: Tensor, more: list[Tensor | None], has_lse: bool) -> None:
    rows, *strides = as_rows(t)
    launch(
        "attention_softmax", f"attention_softmax_{kernel}", [t.dtype], outputs, [rows, *more],
        [*strides, rows.stride(-1), t.shape[:-1].numel(), t.shape[-1], has_lse],
        groups=t.shape[:-1].numel(), threads=t.shape[-1],
    )  # fmt: skip
