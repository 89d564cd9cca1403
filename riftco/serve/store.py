"""What outlives the process: adapters, their optimizers and journals, and the log of what was learned.

    train_dir/base.json                          which base model
    train_dir/audit.jsonl                        one line an event, appended
    train_dir/adapters/<id>/versions/<n>/        PEFT folders
    train_dir/adapters/<id>/checkpoints/...      one checkpoint an event; those that an undo may go back to are kept

An event is a checkpoint, published by one rename (riftco.train.checkpoint). The checkpoint holds the event's line of
the log too: a process that is killed between the rename and the line gets the line back when it starts again.

An event is on the disk before the next one begins, whichever thread writes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..adapters import AdapterError
from ..adapters.peft_config import CONFIG, peft_config, read_spec
from ..adapters.peft_files import PREFIX, WEIGHTS
from ..train.checkpoint import (
    CheckpointError,
    checkpoints,
    fsync,
    open_checkpoint,
    remove,
    save_checkpoint,
    sweep,
    write_file,
)
from .bank import Adapter, AdapterBank, digest
from .batch import Refused
from .learner import Learner
from .pupil import Moment

SHADOW = "shadow.safetensors"
PERSONAL = ("text", "tokens_sha256")  # what `Audit.forget` takes away
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """What is written of an adapter: copies, so that it may change meanwhile.

    Attributes:
        line: of the log; all but the digest, where nobody has computed it.
        state: of the checkpoint, all but that line.
    """

    id: str
    number: int
    moment: Moment
    journal: list[int]
    version: int
    line: dict[str, Any]
    state: dict[str, Any]


class Store:
    """The folder of one base model's adapters. It has one owner at a time, until `close` or the process's end.

    Args:
        train_dir: the folder; made if missing.
        base_digest: identity of the base model; a folder of another one is refused.
        base: name of the base model, for PEFT's configuration.

    Raises:
        CheckpointError: the folder belongs to another base model, or to another owner.
        NotADirectoryError: it is a file.
    """

    def __init__(self, train_dir: str | os.PathLike[str], base_digest: str, base: str = ""):
        self.folder, self.base = pathlib.Path(train_dir), base
        self._writer = ThreadPoolExecutor(1, "riftco-store")
        if self.folder.is_file():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._own()
        known = self.folder / "base.json"
        if known.exists():
            theirs = _digest_in(known)
            if theirs != base_digest:
                self.close()
                raise CheckpointError(
                    f"{self.folder} holds adapters of another base model (digest {theirs[:12]}, here "
                    f"{base_digest[:12]}); serve that model, or name another folder"
                )
        else:
            write_file(known, json.dumps({"digest": base_digest}))
        self.audit = Audit(self.folder / "audit.jsonl")
        self.events: dict[str, int] = {}  # adapter -> number of its newest event
        self.journals: dict[str, list[int]] = {}  # adapter -> events that can be gone back to, oldest first
        self.versions: dict[str, int] = {}  # adapter -> how many versions its newest event names

    def _own(self) -> None:
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        self._leave = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise CheckpointError(
                f"{self.folder} is in use by another server; stop it, or name another folder"
            ) from None

    def close(self) -> None:
        """Leave the folder to others; nothing is to be recorded afterwards."""
        self._writer.shutdown()
        self._leave()

    def load(self, bank: AdapterBank, learner: Learner) -> list[str]:
        """Bring back every adapter of the folder as its newest event left it; their ids."""
        root = self.folder / "adapters"
        ids = sorted(f.name for f in root.iterdir() if f.is_dir()) if root.is_dir() else []
        return [id for id in ids if self._load(id, bank, learner)]

    def _load(self, id: str, bank: AdapterBank, learner: Learner) -> bool:
        where = self._of(id)
        sweep(where / "checkpoints")
        found = checkpoints(where / "checkpoints")
        if not found:  # killed before its first event: it never was
            if any(line["adapter"] == id for line in self.audit.lines()):
                raise CheckpointError(f"{where} has lost its checkpoints; put them back, or move the folder away")
            shutil.rmtree(where)
            return False
        newest = open_checkpoint(found[-1])
        state = newest.state
        for version in range(1, state["versions"] + 1):
            folder = where / "versions" / str(version)
            try:
                weights = self._version(id, version)
                if version == 1:
                    bank.create(id, read_spec(folder), state=weights)
                else:
                    bank.publish(id, weights)
            except (OSError, AdapterError) as why:
                raise CheckpointError(f"{folder} is damaged ({why}); put it back from a copy") from why
            self._let_go(id, bank)
            if bank.of(id).digests[-1] != state["digests"][version - 1]:
                raise CheckpointError(f"{folder} was changed; its weights do not have the digest that was recorded")
        for orphan in (where / "versions").iterdir():  # written, and killed before the event that names it
            if orphan.name not in map(str, range(1, state["versions"] + 1)):
                shutil.rmtree(orphan)
        self.events[id], self.journals[id] = state["step"], list(state["journal"])
        self.versions[id] = state["versions"]
        pupil = learner.pupil(id)
        pupil.go_back(self._moment(id, state["step"]))
        pupil.journal = deque(self._moment(id, event) for event in state["journal"])
        for folder in found:  # the log may have refused several lines before the end
            self.audit.complete(open_checkpoint(folder).state["record"])
        return True

    def _moment(self, id: str, event: int) -> Moment:
        at = open_checkpoint(self._of(id) / "checkpoints" / f"step-{event:08d}")
        return Moment(at.state["taught"], load_file(at.folder / SHADOW), at.state["optimizer"], dict(at.tensors))

    def record(self, kind: str, id: str, bank: AdapterBank, learner: Learner, line: Mapping[str, Any]) -> None:
        """Publish an event of adapter `id` as memory holds it now, then its line of the log.

        Args:
            kind: "create", "learn", "undo", "promote" or "rollback".
            line: what the log says beside time, kind, adapter, event, version and digest.
        """
        self._write(self._event(kind, id, bank, learner, line), bank)

    def begin(
        self, kind: str, id: str, bank: AdapterBank, learner: Learner, line: Mapping[str, Any]
    ) -> Future[None]:  # fmt: skip
        """The same beside what goes on, of copies. No other event may begin before the future is done."""
        return self._writer.submit(self._write, self._event(kind, id, bank, learner, line), bank)

    def _event(
        self, kind: str, id: str, bank: AdapterBank, learner: Learner, line: Mapping[str, Any]
    ) -> Event:  # fmt: skip
        adapter, pupil = bank.of(id), learner.pupil(id)
        number, version, moment = self.events.get(id, 0) + 1, adapter.version, pupil.moment()
        journal = self._journal(kind, id, len(pupil.journal))
        said = {
            **line, "time": time.time(), "kind": kind, "adapter": id, "event": number, "version": version,
        }  # fmt: skip
        state = {
            "step": number, "taught": moment.step, "versions": version, "digests": list(adapter.digests),
            "journal": journal, "optimizer": moment.optimizer,
        }  # fmt: skip
        return Event(id, number, moment, journal, version, said, state)

    def _write(self, event: Event, bank: AdapterBank) -> None:
        id, where, moment = event.id, self._of(event.id), event.moment
        for version in range(self.versions.get(id, 0) + 1, event.version + 1):
            self._save_version(where / "versions" / str(version), bank.of(id), version)
        record = event.line if "digest" in event.line else {**event.line, "digest": digest(moment.shadow)}
        logged = {k: v for k, v in record.items() if k not in PERSONAL}  # these are in one place alone

        def write(folder: pathlib.Path) -> None:
            save_file({k: t.contiguous() for k, t in moment.shadow.items()}, folder / SHADOW)

        root = where / "checkpoints"
        folder = root / f"step-{event.number:08d}"
        if folder.exists():  # of an event that was taken back when the disk refused even that
            remove(folder)
        try:
            save_checkpoint(root, {**event.state, "record": logged}, moment.tensors, write, keep=1 << 30)
        except BaseException:  # perhaps after the rename: the event is taken back, and must not be found again
            if folder.exists():
                remove(folder)
            raise
        self.events[id], self.journals[id], self.versions[id] = event.number, event.journal, event.version
        self._let_go(id, bank)
        self._drop(root, {f"step-{n:08d}" for n in (*event.journal, event.number)})
        try:
            self.audit.append(record)
        except OSError as why:  # the event stands: its line waits in memory, and in the checkpoint
            log.error("%s: %s; the line of event %d of %r is written later", self.audit.path, why, event.number, id)

    def _version(self, id: str, version: int) -> dict[str, Tensor]:
        folder = self._of(id) / "versions" / str(version)
        try:
            return {k.removeprefix(PREFIX): t for k, t in load_file(folder / WEIGHTS).items()}
        except SafetensorError as why:
            raise AdapterError(f"version {version} of adapter {id!r} is damaged ({why})") from why

    def _let_go(self, id: str, bank: AdapterBank) -> None:
        """Versions that lie on the disk and that nothing new is served under are read when they are asked for."""
        device = bank.model.device
        bank.of(id).versions.let_go(lambda version: {k: t.to(device) for k, t in self._version(id, version).items()})

    def _drop(self, root: pathlib.Path, kept: set[str]) -> None:
        """Remove what no undo may reach; what cannot be removed now is tried again after the next event."""
        for folder in checkpoints(root):
            if folder.name not in kept:
                try:
                    remove(folder)
                except OSError as why:
                    log.error("%s: %s; it stays for now", folder, why)

    def _journal(self, kind: str, id: str, depth: int) -> list[int]:
        """The events behind the in-memory journal's moments: what changes the shadow adds the one before it, an undo
        takes some off."""
        known = self.journals.get(id, [])
        if kind in ("learn", "rollback"):
            known = [*known, self.events[id]]
            return known[len(known) - depth :]
        return known[:depth]

    def _save_version(self, folder: pathlib.Path, adapter: Adapter, version: int) -> None:
        if folder.exists():  # of an event that was taken back
            shutil.rmtree(folder)
        fresh = folder.with_name(f".writing-{folder.name}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        state = adapter.versions[version - 1]
        save_file({f"{PREFIX}{k}": t.cpu().contiguous() for k, t in state.items()}, fresh / WEIGHTS, {"format": "pt"})
        (fresh / CONFIG).write_text(json.dumps(peft_config(adapter.spec, self.base), indent=2))
        for file in fresh.iterdir():
            fsync(file)
        fresh.rename(folder)
        fsync(folder.parent)

    def _of(self, id: str) -> pathlib.Path:
        return self.folder / "adapters" / id


class Audit:
    """Lines of JSON, each appended and synced whole; half a line at the end is cut off at the start."""

    def __init__(self, path: pathlib.Path):
        self.path, self._lock = path, threading.Lock()  # a line may be forgotten while another is written
        self._pending: list[dict[str, Any]] = []
        if path.exists():
            whole = path.read_bytes()
            end = whole.rfind(b"\n") + 1
            if end < len(whole):
                os.truncate(path, end)

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises OSError where the disk refuses; the line is then written before the next one."""
        with self._lock:
            self._pending.append(dict(record))
            text = "".join(json.dumps(line) + "\n" for line in self._pending)
            with open(self.path, "ab", buffering=0) as log:  # a buffer would be written again on the way out
                before, data = log.tell(), text.encode()
                try:
                    if log.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(log.fileno())
                except OSError:
                    os.truncate(self.path, before)
                    raise
            self._pending.clear()

    def complete(self, record: Mapping[str, Any]) -> None:
        """Append the line of an event that was published and not logged."""
        if not any(r["adapter"] == record["adapter"] and r["event"] == record["event"] for r in self.lines()):
            self.append(record)

    def newest(self, n: int) -> list[dict[str, Any]]:
        """The last n lines, without reading those before them."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as log:
            at, tail = log.seek(0, os.SEEK_END), b""
            while at and tail.count(b"\n") <= n:
                step = min(at, 1 << 16)
                at = log.seek(at - step)
                tail = log.read(step) + tail
        whole = tail.split(b"\n")[:-1]  # what follows the last line's end is not written yet
        return self._parsed(line.decode() for line in whole[-n:])

    def lines(self) -> list[dict[str, Any]]:
        return self._parsed(self.path.read_text().splitlines() if self.path.exists() else [])

    def _parsed(self, lines: Iterable[str]) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in lines]
        except ValueError as why:
            raise CheckpointError(f"{self.path} is damaged ({why}); put it back from a copy, or move it away") from None

    def forget(self, learn_id: str) -> int:
        """Take a learn's tokens and text out of the log, for good; how many lines had them."""
        with self._lock:
            lines, touched = self.lines(), 0
            for line in lines:
                if line.get("learn_id") == learn_id and not line.get("deleted"):
                    for name in PERSONAL:
                        line.pop(name, None)
                    line["deleted"] = time.time()
                    touched += 1
            if not touched:
                raise Refused(f"the log has no learn {learn_id!r}")
            write_file(self.path, "".join(json.dumps(line) + "\n" for line in lines))
            return touched


def _digest_in(file: pathlib.Path) -> str:
    try:
        return json.loads(file.read_text())["digest"]
    except (ValueError, TypeError, KeyError) as why:
        raise CheckpointError(f"{file} is damaged ({why!r}); put it back from a copy") from None


def tokens_sha256(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.to(torch.int64).cpu().numpy().tobytes()).hexdigest()
