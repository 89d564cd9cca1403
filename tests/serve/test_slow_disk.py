"""A learn is written while others are served, and told once the disk has it."""

import threading

import pytest
import torch
from objective import SPEC, decoder, tokens
from test_store import assert_same, held

from riftco.serve import Engine, Refused, Request, Scheduler, Store, Teach
from riftco.train import checkpoint

pytest.importorskip("fastapi", reason="riftco[serve] is not installed")
from riftco.serve.http.service import Service

PROMPT, REPLY, OTHER = tokens(8, 1).tolist(), [5, 6, 7], tokens(6, 2).tolist()


class Disk:
    """What a store writes waits until `go` is set, or is refused."""

    def __init__(self, monkeypatch):
        self.arrived, self.go, self.full = threading.Event(), threading.Event(), False
        real = checkpoint.save_checkpoint

        def save(*args, **options):
            self.arrived.set()
            assert self.go.wait(60)
            if self.full:
                raise OSError(28, "No space left on device")
            return real(*args, **options)

        monkeypatch.setattr("riftco.serve.store.save_checkpoint", save)


@pytest.fixture
def made(tmp_path):
    store = Store(tmp_path, "digest")
    engine = Engine(decoder(), slots=2, window=64, cache_dtype="float32", store=store)
    engine.create("a", SPEC, seed=1)
    scheduler = Scheduler(engine)
    yield scheduler
    scheduler.close()
    store.close()


@pytest.fixture
def disk(made, monkeypatch):
    return Disk(monkeypatch)


def served(made, n=20):
    """So many tokens of a neighbour come."""
    neighbour = made.submit(Request(OTHER, max_new_tokens=n, slot=1))
    for _ in range(n):
        neighbour.next(timeout=20)
    return neighbour


def taught(made):
    return made.submit(Request(PROMPT, max_new_tokens=4, slot=0, teach=Teach("a", 1e-3, REPLY)))


def beside(what):
    """Run it on a thread; its result comes into the list."""
    got = []

    def run():
        try:
            got.append(what())
        except BaseException as why:
            got.append(why)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, got


@pytest.mark.parametrize("how", ["turn", "afterwards", "job"])
def test_neighbours_go_on_while_a_learn_is_written(how, made, disk, tmp_path):
    made.start()
    text = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]), None
    if how == "turn":
        ticket = taught(made)
        thread, got = beside(lambda: [*ticket] and ticket.finished.learn)
    elif how == "afterwards":
        [*made.submit(Request(PROMPT, max_new_tokens=2, slot=0))]
        thread, got = beside(lambda: made.learn(0, PROMPT, REPLY, "a", 1e-3))
    else:
        study = made.engine.study
        thread, got = beside(lambda: made.apart(lambda: study([text], adapter="a", lr=1e-3, wait=False)))
    assert disk.arrived.wait(60)
    for _ in range(3):
        served(made)
    assert not got and made.totals.learned == 0, "it is not told before the disk has it"
    assert len(made.engine.store.audit.lines()) == 1
    disk.go.set()
    thread.join(60)
    assert got[0].success and got[0].step == 1 and made.totals.learned == 1
    assert [line["kind"] for line in made.engine.store.audit.lines()] == ["create", "learn"]


@pytest.mark.parametrize("how", ["turn", "afterwards"])
def test_a_disk_that_refuses_late_takes_the_step_back(how, made, disk):
    before, random = held(made.engine), torch.get_rng_state()
    disk.full = True
    made.start()
    if how == "turn":
        ticket = taught(made)
    else:
        [*made.submit(Request(PROMPT, max_new_tokens=2, slot=0))]
        thread, got = beside(lambda: made.learn(0, PROMPT, REPLY, "a", 1e-3))
    assert disk.arrived.wait(60)
    served(made)
    disk.go.set()
    if how == "turn":
        assert [*ticket] and "No space" in ticket.finished.learn.reason
    else:
        thread.join(60)
        assert isinstance(got[0], OSError)
    assert_same(held(made.engine), before)
    assert torch.equal(torch.get_rng_state(), random) and made.totals.learned == 0
    disk.full = False
    assert made.learn(0, PROMPT, REPLY, "a", 1e-3).step == 1, "the next one is the first"
    assert [line["event"] for line in made.engine.store.audit.lines()] == [1, 2]


@pytest.mark.parametrize("change", ["promote", "undo", "learn"])
def test_the_next_change_waits_for_the_disk_and_holds_nobody_up(change, made, disk):
    """None is made on top of a step that may yet be taken back."""
    made.start()
    first = taught(made)
    assert disk.arrived.wait(60)
    if change == "learn":
        second = taught(made)
        thread, got = beside(lambda: [*second] and second.finished.learn.step)
    else:
        service = Service.__new__(Service)
        service.scheduler = made
        thread, got = beside(lambda: service.change(lambda: getattr(made.engine, change)("a")))
    served(made)
    assert not got and made.engine.bank.of("a").version == 1 and made.engine.learner.pupils["a"].step == 1
    disk.go.set()
    thread.join(60)
    assert [*first] and first.finished.learn.success
    assert got == [{"promote": 2, "undo": 0, "learn": 2}[change]]
    kinds = [line["kind"] for line in made.engine.store.audit.lines()]
    assert kinds == ["create", "learn", change]


def test_who_hangs_up_while_it_is_written_has_learned(made, disk):
    """The step lasts, so its end has the outcome: a learn id that is sent again is not learned again."""
    made.start()
    ends = []
    ticket = made.submit(
        Request(PROMPT, max_new_tokens=4, slot=0, teach=Teach("a", 1e-3, REPLY)), lambda end: ends.append(end.learn)
    )
    assert disk.arrived.wait(60)
    ticket.cancel()
    served(made)
    assert not ends
    disk.go.set()
    assert [*ticket] and ends[0].success


def test_closing_waits_for_the_disk(made, disk):
    made.start()
    ticket = taught(made)
    assert disk.arrived.wait(60)
    thread, got = beside(made.close)
    thread.join(0.1)
    assert not got
    disk.go.set()
    thread.join(60)
    assert ticket.finished.learn.success
    with pytest.raises(Refused, match="closed"):
        taught(made)


def test_who_asks_the_engine_itself_waits(made, disk):
    """Without a scheduler's help: a change made directly comes after the step that is on its way."""
    made.engine.use(0, {})
    taught(made)
    threading.Timer(0.1, disk.go.set).start()
    while made.engine.writing is None:
        made.step()
    assert made.engine.promote("a") == 2 and made.engine.writing is None
    made.run()
