"""The structs of csrc/cpu, field by field in the same order (product.h, attention.h, step.cpp)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

INT, REAL, POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def _fields(**kinds: Any) -> list[tuple[str, Any]]:
    """Names of one kind, separated by spaces, under any keyword that ends in a number or none."""
    known = {"int": INT, "real": REAL, "pointer": POINTER}
    return [(n, known.get(key.rstrip("0123456789"), key)) for key, names in kinds.items() for n in names.split()]


class Matrix(ctypes.Structure):
    _fields_ = _fields(pointer="data bias a b", int="format n k row_bytes rank", real="scale")


class Rows(ctypes.Structure):
    _fields_ = _fields(pointer="k v k_scale v_scale table", int="kind page table_stride")


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *_fields(pointer="before_attention after_attention before_mlp after_mlp q_norm k_norm"),
        ("cache", Rows),
        *_fields(int="group rotates local left"),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *_fields(int="n_layers C H K D F V half bf16 gelu", real="eps scale softcap final_softcap"),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", POINTER),
        ("head", Matrix),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *_fields(int="rows capacity parts threads", pointer="x"),
        ("cos", POINTER * 2),
        ("sin", POINTER * 2),
        *_fields(pointer1="slot start begin at", int2="wanted", pointer3="which logits work"),
    ]


def address(t: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
    """Where a contiguous tensor of the CPU begins; its owner keeps it alive."""
    if t is None:
        return None
    if not t.is_contiguous() or t.device.type != "cpu" or (dtype is not None and t.dtype != dtype):
        raise ValueError(
            f"must be contiguous on the CPU{'' if dtype is None else f', {dtype}'}; got {t.dtype} {t.shape}"
        )
    return t.data_ptr()
