"""Folders that are in use, damaged, or on a disk that refuses: named, and never a state that was not."""

import os
import shutil
import subprocess
import sys

import pytest
from learns_until_killed import event, start
from test_store import HERE, assert_same, held

from riftco.serve import Store
from riftco.train.checkpoint import CheckpointError


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"notes\.md"):
        Store(tmp_path / "notes.md", "digest")


def test_a_folder_in_use_is_refused(tmp_path):
    made = start(tmp_path)
    with pytest.raises(CheckpointError, match="is in use by another server"):
        Store(tmp_path, "digest")
    command = [sys.executable, str(HERE / "learns_until_killed.py"), str(tmp_path), "9"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    other = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert other.returncode and "is in use by another server" in other.stderr
    made.store.close()
    Store(tmp_path, "digest").close()


def full(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_promotion_that_failed_leaves_no_version_behind(tmp_path, monkeypatch):
    """What is promoted later has its own weights, though the server ran on."""
    made = start(tmp_path)
    event(made, 1)
    with monkeypatch.context() as patch:
        patch.setattr("riftco.serve.store.save_checkpoint", full)
        with pytest.raises(OSError, match="No space"):
            made.promote("a")
    event(made, 2)
    made.promote("a")
    assert_same(held(start(tmp_path)), held(made))


def test_an_event_that_failed_behind_its_rename_never_was(tmp_path, monkeypatch):
    from riftco.train import checkpoint

    made = start(tmp_path)
    event(made, 1)
    before, real = held(made), checkpoint.fsync
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "fsync", lambda path: full() if path.name == "checkpoints" else real(path))
        with pytest.raises(OSError, match="No space"):
            event(made, 2)
    assert_same(held(made), before)
    event(made, 4)
    assert_same(held(start(tmp_path)), held(made))


def test_an_event_that_could_not_be_taken_off_the_disk_does_not_stand_for_the_next(tmp_path, monkeypatch):
    """Both have the same number."""
    from riftco.train import checkpoint

    made = start(tmp_path)
    event(made, 1)
    real = checkpoint.fsync
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "fsync", lambda path: full() if path.name == "checkpoints" else real(path))
        patch.setattr("riftco.serve.store.remove", full)
        with pytest.raises(OSError, match="No space"):
            event(made, 2)
        patch.setattr(checkpoint, "fsync", real)
        with pytest.raises(OSError, match="No space"):
            event(made, 4)
    event(made, 4)
    assert_same(held(start(tmp_path)), held(made))


def test_an_old_checkpoint_that_stays_takes_no_event_back(tmp_path, monkeypatch, caplog):
    made = start(tmp_path)
    for n in (1, 2, 4):
        event(made, n)
    with monkeypatch.context() as patch:
        patch.setattr("riftco.serve.store.remove", full)
        event(made, 6)
    assert made.learner.pupil("a").step == 4 and "it stays for now" in caplog.text
    assert_same(held(start(tmp_path)), held(made))


def test_lines_that_waited_are_not_lost(tmp_path, monkeypatch):
    made = start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(made.store.audit), "append", full)
        for n in (1, 2):
            event(made, n)
    assert [r["event"] for r in start(tmp_path).store.audit.lines()] == [1, 2, 3]


def test_a_note_does_not_speak_for_the_log(tmp_path):
    made = start(tmp_path)
    made.learn(0, 10, [1], [2], adapter="a", lr=1e-2, note={"event": 9, "kind": "create", "lr": 0, "caller": "me"})
    line = made.store.audit.lines()[-1]
    assert (line["event"], line["kind"], line["lr"], line["caller"]) == (2, "learn", 1e-2, "me")


def test_no_file_of_a_folder_can_break_unnoticed(tmp_path):
    """Each file cut or deleted: the start says which, or gives the same state; it never deletes what was published."""
    whole = tmp_path / "whole"
    made = start(whole)
    for n in (1, 2, 3, 4):
        event(made, n)
    kept, files = held(made), sorted(f.relative_to(whole) for f in whole.rglob("*") if f.is_file())
    assert len(files) > 15
    for file in files:
        for cut in (None, 0, (whole / file).stat().st_size // 2):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            if cut is None:
                (copy / file).unlink()
            else:
                os.truncate(copy / file, cut)
            try:
                assert_same(held(start(copy)), kept)
            except CheckpointError as why:
                assert str(copy) in str(why)
                assert {f.relative_to(copy) for f in copy.rglob("*") if f.is_file()} >= {*files} - {file}


def test_lost_checkpoints_do_not_take_the_versions_along(tmp_path):
    made = start(tmp_path)
    event(made, 1)
    made.promote("a")
    shutil.rmtree(tmp_path / "adapters" / "a" / "checkpoints")
    with pytest.raises(CheckpointError, match="has lost its checkpoints"):
        start(tmp_path)
    assert (tmp_path / "adapters" / "a" / "versions" / "2").is_dir()


def test_what_is_no_adapter_is_let_be(tmp_path):
    start(tmp_path)
    (tmp_path / "adapters" / ".DS_Store").write_text("x")
    assert list(start(tmp_path).bank.adapters) == ["a"]


def test_a_log_with_holes_is_named(tmp_path):
    made = start(tmp_path)
    event(made, 1)
    log = tmp_path / "audit.jsonl"
    log.write_bytes(b"\0" * 40 + log.read_bytes()[40:])
    with pytest.raises(CheckpointError, match="is damaged"):
        start(tmp_path)
    log.unlink()
    assert [r["event"] for r in start(tmp_path).store.audit.lines()] == [1, 2], "of the checkpoints that are kept"
