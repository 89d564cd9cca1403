"""What a server learned outlives it."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from learns_until_killed import PROMPT, REPLY, event, start
from objective import decoder, engine, prefill, tokens

from riftco.adapters import AdapterError, load_adapter
from riftco.serve import Refused, Store, Use
from riftco.train.checkpoint import CheckpointError

HERE = pathlib.Path(__file__).parent


def held(made):
    """All that an event publishes."""
    adapter, pupil = made.bank.adapters["a"], made.learner.pupil("a")
    moments = [pupil.moment(), *pupil.journal]
    tensors = [t for m in moments for part in (m.shadow, m.tensors) for _, t in sorted(part.items())]
    tensors += [t for v in adapter.versions for _, t in sorted(v.items())]
    return tensors, [m.step for m in moments], adapter.digests, made.store.events, made.store.journals


def assert_same(a, b):
    assert a[1:] == b[1:]
    assert len(a[0]) == len(b[0]) and all(torch.equal(s, t) for s, t in zip(a[0], b[0]))


@pytest.mark.parametrize("events", [1, 3, 4, 8, 14])
def test_a_restart_goes_on_where_it_was(tmp_path, events):
    """After learns, promotions and undos: everything, the way back included."""
    made = start(tmp_path / "first")
    for n in range(1, events):
        event(made, n)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    again = start(tmp_path / "second")
    assert_same(held(again), held(made))
    for n in range(events, events + 3):
        for e in (made, again):
            event(e, n)
    assert_same(held(again), held(made))


def test_the_log_has_a_line_an_event(tmp_path):
    made = start(tmp_path)
    for n in range(1, 9):
        event(made, n)
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [r["event"] for r in lines] == list(range(1, 10))
    kinds = ["create", "learn", "learn", "promote", "learn", "undo", "learn", "learn", "promote"]
    assert [r["kind"] for r in lines] == kinds
    learned = lines[1]
    assert learned["learn_id"] == "n1" and learned["n_labelled"] == 9 and learned["lr"] == 1e-2
    assert learned["slots"] == [0] and learned["prefix"] == [10] and len(learned["tokens_sha256"]) == 64
    assert learned["digest"] != lines[2]["digest"] and learned["version"] == 1 and lines[3]["version"] == 2
    assert "text" not in learned


def test_a_version_is_a_peft_folder(tmp_path):
    made = start(tmp_path)
    event(made, 1)
    made.promote("a")
    model = decoder()
    load_adapter(model, tmp_path / "adapters" / "a" / "versions" / "2")
    made.use(0, {"a": 1.0})
    ids = tokens(6)
    logits = model(ids[None])[0, -1:]
    torch.testing.assert_close(prefill(made, 0, ids), logits, rtol=1e-4, atol=1e-4)


def test_only_what_an_undo_may_reach_is_kept(tmp_path):
    made = start(tmp_path)
    for n in (1, 2, 4, 6, 7, 9):
        event(made, n)
    kept = sorted(f.name for f in (tmp_path / "adapters" / "a" / "checkpoints").iterdir())
    assert kept == [f"step-{n:08d}" for n in (4, 5, 6, 7)]


@pytest.mark.parametrize("what", ["save_checkpoint", "peft_config"])
def test_a_disk_that_refuses_takes_the_event_back(tmp_path, what, monkeypatch):
    made = start(tmp_path)
    for n in (1, 2):
        event(made, n)
    before = held(made)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"riftco.serve.store.{what}", full)
        if what == "save_checkpoint":
            for call in (lambda: event(made, 1), lambda: made.undo("a", 2)):
                with pytest.raises(OSError, match="No space"):
                    call()
        with pytest.raises(OSError, match="No space"):
            made.promote("a")
    assert_same(held(made), before)
    assert_same(held(start(tmp_path)), before)
    event(made, 1)
    made.promote("a")
    assert_same(held(start(tmp_path)), held(made))


def test_a_log_that_refuses_is_completed_later(tmp_path, monkeypatch, caplog):
    made = start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
        patch.setattr("riftco.train.checkpoint.fsync", lambda path: None)
        event(made, 1)
    assert "I/O error" in caplog.text and len(made.store.audit.lines()) == 1
    again = start(tmp_path)  # had it been killed here
    assert [r["event"] for r in again.store.audit.lines()] == [1, 2]


def test_half_a_line_is_cut_off(tmp_path):
    made = start(tmp_path)
    event(made, 1)
    log = tmp_path / "audit.jsonl"
    whole = log.read_text()
    log.write_text(whole[:-20])
    start(tmp_path)
    assert [r["event"] for r in made.store.audit.lines()] == [1, 2]


def test_another_base_and_changed_weights_are_refused(tmp_path):
    start(tmp_path).store.close()
    with pytest.raises(CheckpointError, match="another base model"):
        Store(tmp_path, "other")
    file = tmp_path / "adapters" / "a" / "versions" / "1" / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="was changed"):
        start(tmp_path)


def test_a_learns_tokens_are_forgotten(tmp_path):
    made = start(tmp_path)
    for n in (1, 2):
        event(made, n)
    assert made.store.audit.forget("n1") == 1
    first, second = made.store.audit.lines()[1:]
    assert "tokens_sha256" not in first and first["deleted"] and "tokens_sha256" in second
    with pytest.raises(Refused, match="no learn 'n1'"):
        made.store.audit.forget("n1")
    hashed = second["tokens_sha256"]
    assert not any(hashed in f.read_text() for f in tmp_path.rglob("state.json")), "it stands in the log alone"
    event(made, 1)
    assert len(start(tmp_path).store.audit.lines()) == 4


def kills(folder, count, seed):
    """Kill a learning server at `count` random moments; what it holds at last, and how often it was caught at work."""
    rng, caught, most = random.Random(seed), 0, 10_000  # more events than any of its lives is long
    for _ in range(count):
        command = [sys.executable, str(HERE / "learns_until_killed.py"), str(folder), str(most)]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read().split()
            caught += process.wait() == -signal.SIGKILL
        made = start(folder)  # it starts, whatever was left
        assert not said or made.store.events["a"] > int(said[-1]), "what was acknowledged is there"
        lines = made.store.audit.lines()
        assert [r["event"] for r in lines] == list(range(1, made.store.events["a"] + 1))
        assert lines[-1]["digest"] == made.bank.adapters["a"].digests[-1] or lines[-1]["kind"] != "promote"
        made.store.close()  # the next one may have the folder
    return made, caught


def test_killed_at_any_moment_it_is_consistent(tmp_path):
    check_kills(tmp_path, 3, 0)


@pytest.mark.slow
def test_killed_fifty_times(tmp_path):
    for seed in range(5):
        check_kills(tmp_path / str(seed), 10, seed)


def check_kills(folder, count, seed):
    """What was killed and started again holds bit for bit what a server that ran through the same events holds."""
    made, caught = kills(folder / "killed", count, seed)
    assert caught == count
    through, threads = start(folder / "through"), torch.get_num_threads()
    torch.set_num_threads(1)  # as the killed one has: sums of several threads have other bits
    try:
        for n in range(through.store.events["a"], made.store.events["a"]):
            event(through, n)
    finally:
        torch.set_num_threads(threads)
    assert_same(held(made), held(through))


def test_the_guard_takes_back_what_harms_the_probe():
    ids = torch.cat([PROMPT[-1:], REPLY[:-1]])

    def learnt(rise):
        made = engine(probe=[tokens(12, 30)], probe_rise=rise)
        prefill(made, 0, PROMPT)
        return made, made.learn(0, 10, ids, REPLY, adapter="a", lr=1e-1)

    made, outcome = learnt(100.0)
    assert outcome.success
    with made.bank.serving(()):
        base = made.learner.probe_loss()
    with made.bank.learning((), "a"):
        rise = made.learner.probe_loss() - base
    assert learnt(rise + 1e-3)[1].success
    made, outcome = learnt(rise - 1e-3)
    assert not outcome.success and "the step was undone" in outcome.reason
    with made.bank.learning((), "a"):
        assert made.learner.probe_loss() - base != pytest.approx(rise, abs=1e-3)
    assert made.learner.pupils["a"].step == 0 and not made.learner.pupils["a"].journal


def test_old_versions_are_read_from_the_disk(tmp_path):
    """However often an adapter is promoted, two of its versions are in memory; any can serve and be rolled back to."""
    made = start(tmp_path)
    states = [{k: t.clone() for k, t in made.bank.of("a").versions[-1].items()}]
    for n in (1, 2, 4, 6, 7):
        event(made, n)
        made.promote("a")
        states.append({k: t.clone() for k, t in made.bank.of("a").versions[-1].items()})
    for again in (False, True):
        here = start(tmp_path) if again else made
        adapter = here.bank.of("a")
        assert [state is None for state in adapter.versions._held] == [True] * 4 + [False] * 2
        for index, state in enumerate(states):
            assert all(torch.equal(adapter.versions[index][k], t) for k, t in state.items())
    here.rollback("a", 2)
    assert adapter.version == 7 and adapter.digests[6] == adapter.digests[1]
    with here.bank.serving((Use("a", 3),)):  # a turn that began long ago
        pass
    damaged = tmp_path / "adapters" / "a" / "versions" / "1" / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:50])
    with pytest.raises(AdapterError, match="version 1 of adapter 'a' is damaged"):
        here.rollback("a", 1)
    assert adapter.version == 7
