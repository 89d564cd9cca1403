"""Checkpoints: folders that appear whole or not at all.

    checkpoints/step-00000020/  the weights' files, state.json, state.safetensors, manifest.json

A checkpoint is written under a hidden name, every file and the folder are fsynced, and one rename publishes it. An old
one is renamed to a hidden name before it is deleted. So a process that is killed at any moment leaves only whole
checkpoints under their public names.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 2  # 1: positions counted documents, now packed rows
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "state.safetensors"
NAME = re.compile(r"step-(\d{8})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not belong to this run; the message says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found whole: `state` from JSON, `tensors` by name, weights still in `folder`."""

    folder: pathlib.Path
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def step(self) -> int:
        return self.state["step"]


def save_checkpoint(
    root: str | os.PathLike[str],
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    write_weights: Callable[[pathlib.Path], None],
    *,
    keep: int = 2,
    protect: int | None = None,
) -> pathlib.Path:
    """Write one checkpoint and delete all but the newest `keep`.

    Args:
        root: the folder of checkpoints; created if missing.
        state: JSON values with "step".
        tensors: optimizer and random state.
        write_weights: writes the model's or adapter's files into the folder that it is given.
        keep: how many to keep, 1 or more.
        protect: a step whose checkpoint is kept beyond that.
    """
    if keep < 1:
        raise ValueError(f"keep must be 1 or more; got {keep}")
    where = pathlib.Path(root)
    where.mkdir(parents=True, exist_ok=True)
    final = where / f"step-{state['step']:08d}"
    if _whole(final):  # this step was saved before; replacing it would risk the moment between two renames
        return final
    fresh = where / f".writing-{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write_weights(fresh)
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, fresh / TENSORS)
        (fresh / STATE).write_text(json.dumps(dict(state)))
        files = {f.name: {"bytes": f.stat().st_size, "sha256": sha256_of(f)} for f in sorted(fresh.iterdir())}
        (fresh / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
        for file in fresh.iterdir():
            fsync(file)
        fsync(fresh)
        if final.exists():  # damaged, or it would have been returned
            remove(final)
        fresh.rename(final)
        fsync(where)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    for old in checkpoints(where)[:-keep]:
        if old != folder_of(where, protect):
            remove(old)
    return final


def folder_of(root: str | os.PathLike[str], step: int | None) -> pathlib.Path | None:
    """Where the checkpoint of a step lies."""
    return None if step is None else pathlib.Path(root) / f"step-{step:08d}"


def checkpoints(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Published checkpoints, oldest first."""
    where = pathlib.Path(root)
    return sorted(f for f in where.iterdir() if NAME.fullmatch(f.name)) if where.is_dir() else []


def sweep(root: str | os.PathLike[str]) -> None:
    """Remove what a killed process left unfinished. Only for the one process that owns the run."""
    where = pathlib.Path(root)
    for left in [*where.glob(".writing-*"), *where.glob(".deleting-*")] if where.is_dir() else []:
        shutil.rmtree(left)


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint after checking every file against its recorded size and sha256."""
    where = pathlib.Path(folder)
    manifest = _json(where / MANIFEST, where)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{where}: checkpoint format {manifest.get('format')!r} is not supported; this riftco reads {FORMAT}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(want, dict) for want in files.values()):
        raise CheckpointError(_damaged(where, f"{MANIFEST} names no files"))
    for name, want in files.items():
        file = where / name
        if not file.is_file() or file.stat().st_size != want.get("bytes") or sha256_of(file) != want.get("sha256"):
            raise CheckpointError(_damaged(where, f"{name} is missing or changed"))
    try:
        tensors = load_file(where / TENSORS)
    except SafetensorError as bad:
        raise CheckpointError(_damaged(where, f"{TENSORS}: {bad}")) from None
    return Checkpoint(where, _json(where / STATE, where), tensors)


def check_base(checkpoint: Checkpoint, digest: str, model: str) -> None:
    """Refuse to go on with another base model than the checkpoint was trained on."""
    if checkpoint.state["base_digest"] != digest:
        raise CheckpointError(
            f"{checkpoint.folder} was trained on another base model than {model} "
            f"(digest {checkpoint.state['base_digest'][:12]}, here {digest[:12]}); give --model the one it started from"
        )


def write_file(path: pathlib.Path, text: str) -> None:
    """Write a small file so that it appears whole or not at all."""
    fresh = path.with_name(f".{path.name}.writing")
    fresh.write_text(text)
    fsync(fresh)
    fresh.replace(path)
    fsync(path.parent)


def fsync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _whole(folder: pathlib.Path) -> bool:
    if not folder.exists():
        return False
    try:
        open_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def remove(folder: pathlib.Path) -> None:
    """Delete a checkpoint so that no half of it is ever seen."""
    hidden = folder.with_name(f".deleting-{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _json(file: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {file.name}") from None
    except ValueError as bad:
        raise CheckpointError(_damaged(folder, f"{file.name}: {bad}")) from None
    if not isinstance(value, dict):
        raise CheckpointError(_damaged(folder, f"{file.name} holds no object"))
    return value


def _damaged(folder: pathlib.Path, why: str) -> str:
    return f"{folder} is damaged ({why}); delete this folder to resume from the checkpoint before it"


def sha256_of(file: str | pathlib.Path) -> str:
    """Of the whole file, in hexadecimal digits."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
