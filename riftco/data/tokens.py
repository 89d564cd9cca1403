"""Token files: integer arrays with optional labels, weights, top-k labels and sequences. Arrays are borrowed: mapped
from a file, of which only the rows of a micro-batch are ever copied, or the caller's own, whose rows are shared.

A .safetensors or .npz (np.savez, not compressed) file holds arrays by name, a .npy file the ids alone.
"""

from __future__ import annotations

import json
import os
import pathlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import IGNORE, Batch
from .errors import DataError
from .geometry import INT32_MAX, Geometry
from .loader import check_tokens
from .sampler import ShuffledOrder, WindowSampler

SUFFIXES = (".npy", ".npz", ".safetensors")
INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U16": "<u2", "U8": "<u1", "F32": "<f4"}
WIDE = ("uint32", "int64")  # converted to int64, all smaller ones to int32
ACCEPTED = ("int64", "int32", "int16", "int8", "uint32", "uint16", "uint8")


@dataclass(frozen=True)
class TokenArrays:
    """Rows of tokens and what is learnt from them. The arrays stay the caller's and must not change while in use.

    Attributes:
        ids: integers [rows, T], or one corpus [N].
        labels: as ids: the token to predict at each position, negative for none. Without labels each position predicts
            the next token of its sequence, and the last one nothing.
        weights: float32, as ids: scales a position's loss.
        topk_ids, topk_weights: [.., k] int and float32: several weighted labels a position.
        sequence_ids: integers as ids [rows, T], or [rows, T, m]: which sequence of its row each token belongs to;
            without it a row is one sequence.
    """

    ids: np.ndarray
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    topk_weights: np.ndarray | None = None
    sequence_ids: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim not in (1, 2) or 0 in self.ids.shape:
            raise DataError(f"ids must be [rows, T] or one corpus [N], and not empty; got {self.ids.shape}")
        for name, array in self.given().items():
            accepted = ("float32",) if name.endswith("weights") else ACCEPTED
            lead = array.shape[: self.ids.ndim]
            extra = array.ndim - self.ids.ndim
            if lead != self.ids.shape or extra not in ((1,) if "topk" in name else (0, 1) if "seq" in name else (0,)):
                raise DataError(f"{name} {array.shape} does not fit ids {self.ids.shape}")
            if array.dtype.name not in accepted:  # uint64 among others, whose largest ids int64 would make negative
                raise DataError(f"{name} must be {', '.join(accepted)}; got {array.dtype}")
        if (self.topk_ids is None) != (self.topk_weights is None):
            raise DataError("topk_ids and topk_weights belong together; one of them is missing")
        if self.topk_ids is not None:
            assert self.topk_weights is not None
            if self.topk_ids.shape != self.topk_weights.shape:
                raise DataError(f"topk_ids {self.topk_ids.shape} and topk_weights {self.topk_weights.shape} differ")
        if self.topk_ids is not None and self.labels is not None:
            raise DataError("give labels or topk_ids, not both: the first of topk_ids is the label that metrics read")
        if self.ids.ndim == 1 and set(self.given()) != {"ids"}:
            raise DataError("a corpus [N] is drawn in windows and takes ids alone; give rows [rows, T] for the rest")

    def given(self) -> dict[str, np.ndarray]:
        """The arrays that are there, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: a for name, a in values.items() if a is not None}

    def batch(self, rows: slice | np.ndarray) -> Batch:
        """Rows as one micro-batch; a slice of writable arrays is shared where the dtype needs no conversion.

        Raises:
            DataError: weights that are negative or not finite, or tokens of several sequences.
        """
        ids = self.ids[rows]
        count, T = ids.shape
        if self.sequence_ids is None:
            geometry = Geometry.of([T] * count)
        else:
            of = self.sequence_ids[rows].astype(np.int64).reshape(count, T, -1)
            shift = np.arange(count)[:, None, None] * (int(of.max()) + 1)  # the same name in two rows is two sequences
            of = np.where(of >= 0, of + shift, -1)
            geometry = Geometry.of_members(of.reshape(count * T, -1))
        topk_ids = topk_weights = None
        if self.topk_ids is not None:
            assert self.topk_weights is not None
            topk_ids, topk_weights = _flat(self.topk_ids[rows], 2), _flat(self.topk_weights[rows], 2)
            _check_weights("topk_weights", topk_weights)
            target = topk_ids[:, 0]  # the only label column that leaves the borrowed array
        elif self.labels is not None:
            target = _flat(self.labels[rows], 1)
        else:
            target = _next_tokens(_flat(ids, 1), geometry)
        weight = None if self.weights is None else _flat(self.weights[rows], 1)
        if weight is not None:
            _check_weights("weights", weight)
        input_ids = _flat(ids, 1)
        if int(input_ids.min()) < 0:
            raise DataError(f"ids must be 0 or more; got {int(input_ids.min())}")
        return Batch(
            input_ids=input_ids,
            target=target,
            geometry=geometry,
            row_weight=weight,
            n_labelled=int((target >= 0).sum()),
            documents=tuple(range(self.ids.shape[0])[rows] if isinstance(rows, slice) else rows.tolist()),
            topk_ids=topk_ids,
            topk_weights=topk_weights,
        )


def _flat(array: np.ndarray, dims: int) -> Tensor:
    """[rows, T, ..] as a tensor [rows * T, ..] over the same memory where its dtype is one of torch's for tokens."""
    if array.dtype.kind in "iu":
        array = array.astype(np.int64 if array.dtype.name in WIDE else np.int32, copy=False)
    elif not array.dtype.isnative:
        array = array.astype(np.float32)
    array = np.ascontiguousarray(array)
    if not array.flags.writeable:  # a file's pages: a tensor over them would crash whoever writes to it
        array = array.copy()
    return torch.from_numpy(array.reshape(-1, *array.shape[2:][: dims - 1]))


def _next_tokens(ids: Tensor, geometry: Geometry) -> Tensor:
    target = torch.empty_like(ids)
    target[:-1] = ids[1:]
    target[geometry.cu_seqlens[1:].long() - 1] = IGNORE
    return target


def _check_weights(name: str, weights: Tensor) -> None:
    if not (torch.isfinite(weights).all() and (weights >= 0).all()):
        raise DataError(f"{name} must be finite and 0 or more")


class TokenLoader:
    """Micro-batches of a token file: rows [rows, T] in a seeded order, epoch by epoch; or windows of a corpus [N],
    drawn uniformly with replacement, without end.

    Args:
        arrays: what to train on.
        tokens: most tokens of a micro-batch.
        seed: of the order.
        context: the window's length, for a corpus.
        epochs: stop after so many, for rows; None goes on for ever.
    """

    def __init__(
        self, arrays: TokenArrays, tokens: int, seed: int, *, context: int | None = None, epochs: int | None = None
    ):
        check_tokens(tokens)
        self.arrays, self.epochs = arrays, epochs
        self.windows = arrays.ids.ndim == 1
        if self.windows != (context is not None):
            raise DataError("context belongs to a corpus [N], and a corpus needs one")
        T = context if context is not None else arrays.ids.shape[1]
        if tokens < T:
            raise DataError(f"a row of {T} tokens does not fit a micro-batch of {tokens}; raise it to {T} or more")
        self.rows = tokens // T
        self.order = None if self.windows else ShuffledOrder(arrays.ids.shape[0], seed)
        self.sampler = WindowSampler(arrays.ids, T, self.rows, seed) if self.windows else None  # type: ignore[arg-type]

    def next(self) -> Batch | None:
        """The next micro-batch, or None after the last epoch. It ends with its epoch."""
        if self.sampler is not None:
            T = self.sampler.context
            at = np.asarray(self.sampler.draw())[:, None] + np.arange(T + 1)
            window = self.arrays.ids[at]
            return TokenArrays(window[:, :-1], window[:, 1:]).batch(slice(None))
        assert self.order is not None
        if self.epochs is not None and self.order.epoch >= self.epochs:
            return None
        chosen: list[int] = []
        epoch = self.order.epoch
        while self.order.epoch == epoch and len(chosen) < self.rows:
            chosen.append(self.order.peek())
            self.order.advance()
        one = slice(chosen[0], chosen[0] + 1)
        return self.arrays.batch(one if len(chosen) == 1 else np.asarray(chosen))

    def count(self) -> int:
        """How many micro-batches are left until the last epoch ends."""
        if self.order is None or self.epochs is None:
            raise DataError("windows of a corpus, and a loader without a number of epochs, do not end")
        left = max(self.epochs - self.order.epoch, 0)
        first = -(-(self.order.count - self.order.position) // self.rows) if left else 0
        return first + max(left - 1, 0) * -(-self.order.count // self.rows)

    def state_dict(self) -> dict[str, Any]:
        return (self.sampler or self.order).state_dict()  # type: ignore[union-attr]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (self.sampler or self.order).load_state_dict(state)  # type: ignore[union-attr]


def load_tokens(path: str | os.PathLike[str], *, vocabulary: int | None = None) -> TokenArrays:
    """Map a .npy, .npz or .safetensors file; nothing of it is read before it is used, but for the check of ids.

    Args:
        vocabulary: checks the ids against it, a piece at a time. Without it a negative id is refused when its batch
            is made, and one beyond the model's vocabulary by the model.

    Raises:
        DataError: a file that cannot be mapped, unknown names, arrays that do not fit each other, ids out of range.
    """
    if vocabulary is not None and (isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or vocabulary < 1):
        raise DataError(f"vocabulary must be an integer of 1 or more, or None; got {vocabulary!r}")
    where = pathlib.Path(path)
    readers = dict(zip(SUFFIXES, (_npy, _npz, _safetensors)))
    if where.suffix not in readers:
        raise DataError(f"{path}: a token file is one of {', '.join(readers)}")
    if not where.is_file():
        raise DataError(f"{path}: no such file; give the path of a token file")
    try:
        arrays = readers[where.suffix](where)
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as bad:
        raise DataError(f"{path}: cannot be mapped ({bad})") from None
    known = {f.name for f in fields(TokenArrays)}
    if unknown := sorted(set(arrays) - known) or "ids" not in arrays:
        raise DataError(f"{path}: it must hold ids, and may hold {', '.join(sorted(known - {'ids'}))}; got {unknown}")
    try:
        made = TokenArrays(**arrays)
    except DataError as bad:
        raise DataError(f"{path}: {bad}") from None
    if vocabulary is not None:
        for name in ("ids", "labels", "topk_ids"):
            _check_range(where, name, getattr(made, name), vocabulary)
    return made


def _check_range(path: pathlib.Path, name: str, array: np.ndarray | None, vocabulary: int) -> None:
    if array is None:
        return
    flat = array.reshape(-1)
    for start in range(0, len(flat), 1 << 22):
        piece = flat[start : start + (1 << 22)]
        if int(piece.max()) >= vocabulary or (name == "ids" and int(piece.min()) < 0):
            wrong = piece.max() if int(piece.max()) >= vocabulary else piece.min()
            raise DataError(f"{path}: {name} holds {wrong}; the model's vocabulary has {vocabulary} tokens")


def _npy(path: pathlib.Path) -> dict[str, np.ndarray]:
    return {"ids": np.load(path, mmap_mode="r", allow_pickle=False)}


def _npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    found = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{member.filename} is compressed; save it with np.savez")
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read(file)
                header = file.tell()
            if fortran or dtype.hasobject:
                raise ValueError(f"{member.filename} must be a plain array in C order")
            with open(path, "rb") as raw:  # the member's own header repeats the length of its name and extra field
                raw.seek(member.header_offset + 26)
                name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            offset = member.header_offset + 30 + name + extra + header
            found[member.filename.removesuffix(".npy")] = _mapped(path, dtype, offset, shape)
    return found


def _safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
    found = {}
    for name, of in header.items():
        if name != "__metadata__":
            if of["dtype"] not in INTEGERS:
                raise ValueError(f"{name} has dtype {of['dtype']}; accepted: {', '.join(INTEGERS)}")
            dtype = np.dtype(INTEGERS[of["dtype"]])
            found[name] = _mapped(path, dtype, 8 + length + of["data_offsets"][0], tuple(of["shape"]))
    return found


def _mapped(path: pathlib.Path, dtype: np.dtype, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    count = 1
    for n in shape:  # in Python's integers: a product that numpy would wrap is refused instead
        count *= n
    if offset + count * dtype.itemsize > path.stat().st_size or min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} does not fit the file")
    if shape and max(shape[1:], default=0) > INT32_MAX:
        raise OverflowError(f"a row of {max(shape[1:])} tokens does not fit 32-bit offsets")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
