"""A slot's rows as a file: written whole or not at all, and put back byte for byte where they still mean the same.

Rows are what one model made under one set of adapters' versions. The file names both, and is refused elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from ..models import ModelError
from ..models.kv_cache import Snapshot
from ..train.checkpoint import fsync
from .bank import Use, digest
from .batch import Refused
from .engine import Engine

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FORMAT = "riftco-slot-1"
WRITING, HOUR = ".writing-", 3600


@dataclass(frozen=True)
class SavedSlot:
    """Position i of `rows` holds tokens[i], read under `uses`, each with the digest of its version's weights."""

    tokens: list[int]
    uses: tuple[tuple[Use, str], ...]
    rows: Snapshot


def take(engine: Engine, slot: int) -> SavedSlot:
    """Copies of what a slot holds."""
    held = engine.slot(slot)
    if engine.cache.states:
        raise Refused("this model keeps recurrent states; its slots cannot be saved")
    uses = tuple((use, engine.bank.of(use.id).digests[use.version - 1]) for use in held.key)
    return SavedSlot(list(held.tokens), uses, engine.cache.snapshot(slot))


def put(engine: Engine, slot: int, saved: SavedSlot) -> None:
    """Make a slot what was saved.

    Raises:
        Refused: rows under adapters that this server does not serve as they were, or of another kind of cache; the
            slot is what it was.
    """
    held, bank = engine.slot(slot), engine.bank
    for use, was in saved.uses:
        adapter = bank.of(use.id)
        if use.version != adapter.version or adapter.digests[-1] != was:
            raise Refused(
                f"the slot was saved under version {use.version} of adapter {use.id!r} (digest {was[:12]}); version "
                f"{adapter.version} (digest {adapter.digests[-1][:12]}) serves here; serve the prompt again"
            )
    try:
        engine.cache.restore(saved.rows, slot)
    except ModelError as why:
        raise Refused(f"slot {slot}: {why}") from None
    held.key, held.tokens, held.unsure = tuple(use for use, _ in saved.uses), list(saved.tokens), 0


class SlotFiles:
    """The folder of saved slots of one base model. Names cannot lead out of it, and links are not followed.

    Args:
        folder: made if missing.
        base_digest: identity of the base model; files of another one are refused.
    """

    def __init__(self, folder: str | os.PathLike[str], base_digest: str):
        self.folder, self.base = pathlib.Path(folder), base_digest
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"{WRITING}*"):  # of a server that was killed; of one that runs, it is younger
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > HOUR:
                    left.unlink()

    def check(self, name: str) -> None:
        """Refuse a name that no file can have here."""
        if file_in(self.folder, name).is_dir():
            raise Refused(f"{name} is a folder")

    def write(self, name: str, saved: SavedSlot) -> int:
        """Write a slot under this name, in place of what was there; the file's bytes."""
        self.check(name)
        path = self.folder / name
        tensors = {"tokens": torch.tensor(saved.tokens, dtype=torch.int64)}
        tensors |= {f"rows.{g}.{i}": t.cpu().contiguous() for g, i, t in _tensors(saved.rows)}
        about = {
            "base": self.base, "digest": digest(tensors),
            "uses": [[use.id, use.version, use.scale, was] for use, was in saved.uses],
            "first": [first for first, _ in saved.rows.rows], "end": saved.rows.end,
        }  # fmt: skip
        handle, fresh = tempfile.mkstemp(prefix=WRITING, dir=self.folder)
        os.close(handle)
        try:
            save_file(tensors, fresh, {FORMAT: json.dumps(about)})  # one name: their order is not fixed
            fsync(pathlib.Path(fresh))
            os.replace(fresh, path)  # a link of this name is replaced, not followed
        except BaseException:
            pathlib.Path(fresh).unlink(missing_ok=True)
            raise
        fsync(self.folder)
        return path.stat().st_size

    def read(self, name: str) -> tuple[SavedSlot, int]:
        """A saved slot, and the file's bytes.

        Raises:
            FileNotFoundError: there is none of this name.
            Refused: it is damaged, or of another base model.
        """
        with open_inside(self.folder, name) as file:
            data = file.read()
        try:
            about = _metadata(data)
            if about["base"] != self.base:
                raise Refused(
                    f"{name} was saved with another base model (digest {about['base'][:12]}, here {self.base[:12]})"
                )
            tensors = load(data)
            if digest(tensors) != about["digest"]:
                raise ValueError("its bytes do not have the digest that was written")
            return _saved(about, tensors), len(data)
        except Refused:
            raise
        except (SafetensorError, ValueError, KeyError, TypeError) as why:
            raise Refused(f"{name} is no saved slot, or damaged ({why}); save it again") from None


def _tensors(rows: Snapshot) -> Iterator[tuple[int, int, Tensor]]:
    for group, (_, tensors) in enumerate(rows.rows):
        for i, t in enumerate(tensors):
            yield group, i, t


def _metadata(data: bytes) -> Mapping[str, Any]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + size])["__metadata__"][FORMAT])


def _saved(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedSlot:
    rows = []
    for group, first in enumerate(about["first"]):
        n = sum(name.startswith(f"rows.{group}.") for name in tensors)
        rows.append((first, tuple(tensors[f"rows.{group}.{i}"] for i in range(n))))
    uses = tuple((Use(id, version, scale), was) for id, version, scale, was in about["uses"])
    return SavedSlot(tensors["tokens"].tolist(), uses, Snapshot(0, about["end"], tuple(rows), {}))


def file_in(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A file of a request inside `folder`; a name that could lead out of it is refused."""
    if not NAME.fullmatch(name):
        raise Refused(f"a name has letters, digits, '.', '_' and '-'; got {name!r:.120}")
    return folder / name


@contextmanager
def open_inside(folder: pathlib.Path, name: str) -> Iterator[BinaryIO]:
    """Read a regular file of `folder`; a link, a folder, a pipe or a device of that name is refused."""
    path = file_in(folder, name)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {name!r} in the server's folder") from None
    except OSError as why:
        raise Refused(f"{name} cannot be read: {os.strerror(why.errno or 0)}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Refused(f"{name} is no regular file")
    with open(handle, "rb") as file:
        yield file
