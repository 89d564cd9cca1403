"""Checkpoints resume bit-exactly and are whole at every moment."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.tiny import parts

from riftco.train import Schedule, Trainer
from riftco.train.checkpoint import (
    CheckpointError,
    check_base,
    checkpoints,
    open_checkpoint,
    save_checkpoint,
    sweep,
)

TESTS = pathlib.Path(__file__).parents[1]


def trainer():
    model, optimizer, loader = parts(dropout=0.3)
    torch.manual_seed(11)
    return Trainer(model, optimizer, loader, Schedule(0.05, 12, "cosine", warmup=3), accumulate=2)


def save(made, root, keep=2):
    state, tensors = made.state_dict()
    state = {**state, "base_digest": "a" * 64}
    return save_checkpoint(
        root, state, tensors, lambda folder: save_file(made.model.state_dict(), folder / "model.safetensors"), keep=keep
    )


def restore(folder):
    checkpoint = open_checkpoint(folder)
    made = trainer()
    made.model.load_state_dict(load_file(checkpoint.folder / "model.safetensors"))
    made.load_state_dict(checkpoint.state, checkpoint.tensors)
    return made


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_losses_after_a_resume_equal_the_uninterrupted_ones(tmp_path, cut):
    whole = [(m.step, m.loss, m.gradient_norm, m.lr) for m in trainer().run().metrics]
    assert len(whole) == 12
    first = trainer()
    first.run(cut)
    folder = save(first, tmp_path)
    torch.manual_seed(999)  # nothing but the checkpoint may matter
    rest = [(m.step, m.loss, m.gradient_norm, m.lr) for m in restore(folder).run().metrics]
    assert rest == whole[cut:]


def test_saving_does_not_disturb_the_run(tmp_path):
    plain = [m.loss for m in trainer().run().metrics]
    made, losses = trainer(), []
    while made.step < 12:
        losses += [m.loss for m in made.run(1).metrics]
        save(made, tmp_path)
    assert losses == plain


def test_the_newest_are_kept(tmp_path):
    made = trainer()
    for _ in range(4):
        made.run(1)
        save(made, tmp_path, keep=2)
    assert [f.name for f in checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert {f.name for f in tmp_path.iterdir()} == {"step-00000003", "step-00000004"}


def test_the_same_step_again_keeps_a_whole_one_and_replaces_a_damaged_one(tmp_path):
    made = trainer()
    made.run(1)
    folder = save(made, tmp_path, keep=1)
    inode = folder.stat().st_ino
    assert save(made, tmp_path, keep=1).stat().st_ino == inode
    (folder / "state.json").write_text("{}")
    save(made, tmp_path, keep=1)
    assert open_checkpoint(folder).step == 1


def test_a_failure_while_writing_leaves_the_earlier_one(tmp_path):
    made = trainer()
    made.run(1)
    save(made, tmp_path)
    state, tensors = made.state_dict()

    def full(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, {**state, "step": 2}, tensors, full)
    assert [f.name for f in tmp_path.iterdir()] == ["step-00000001"]


KILLED = """
import sys
from train.test_checkpoint import save, trainer
made = trainer()
made.run(1)
print("ready", flush=True)
while True:
    made.step += 1
    save(made, sys.argv[1], keep=2)
    print(made.step, flush=True)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment_leaves_only_whole_checkpoints(tmp_path, kills):
    """A process that does nothing but save is killed at scattered moments; the folder is read after each kill."""
    for i in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            cwd=TESTS,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        )
        try:
            assert process.stdout.readline() == "ready\n"
            while True:
                if int(process.stdout.readline()) >= 4:
                    break
            time.sleep(0.0137 * (i + 1))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        whole = checkpoints(tmp_path)
        assert whole, "four saves were reported"
        for folder in whole:
            assert restore(folder).step >= 2
        sweep(tmp_path)
        assert all(f.name.startswith("step-") for f in tmp_path.iterdir())


def test_the_window_that_a_kill_can_hit_is_real(tmp_path):
    """Stopped between writing and publishing, only a hidden folder exists, and it is swept."""
    made = trainer()
    made.run(1)
    seen = []

    def interrupted(folder):
        seen.append([f.name for f in tmp_path.iterdir()])
        raise KeyboardInterrupt

    state, tensors = made.state_dict()
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state, tensors, interrupted)
    assert len(seen[0]) == 1
    assert seen[0][0].startswith(".writing-")
    (tmp_path / ".writing-1").mkdir()
    (tmp_path / ".deleting-step-00000001").mkdir()
    assert checkpoints(tmp_path) == []
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_named(tmp_path):
    made = trainer()
    made.run(1)
    folder = save(made, tmp_path)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing or changed\); delete this folder"):
        open_checkpoint(folder)
    (folder / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match=r"manifest\.json names no files"):
        open_checkpoint(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        open_checkpoint(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        open_checkpoint(folder)


def test_another_format_or_base_is_refused(tmp_path):
    made = trainer()
    folder = save(made, tmp_path)
    check_base(open_checkpoint(folder), "a" * 64, "model.gguf")
    with pytest.raises(CheckpointError, match=r"another base model than model.gguf"):
        check_base(open_checkpoint(folder), "b" * 64, "model.gguf")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(CheckpointError, match="format 1 is not supported; this riftco reads 2"):
        open_checkpoint(folder)


def test_keep_must_keep_one(tmp_path):
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        save(trainer(), tmp_path, keep=0)
