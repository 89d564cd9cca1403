"""What a learn copies and makes: the layers once an adapter, the state once a step and a few pieces at a time."""

import pytest
import torch
from objective import HEAD, SPEC, add, engine, prefill, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from riftco.serve import Use, bank, side_by_side
from riftco.serve.side_by_side import SideBySide
from riftco.train.state import flatten_optimizer

PROMPT, REPLY = tokens(11, 1), tokens(9, 2)
WHERE = (1, len(PROMPT) - 1, torch.cat([PROMPT[-1:], REPLY[:-1]]), REPLY)


def taught(steps=1, **options):
    made = engine(**options)
    prefill(made, 1, PROMPT)
    for _ in range(steps):
        assert made.learn(*WHERE, adapter="a", lr=1e-2).success
    return made, made.learner.pupil("a")


def test_tensors_lie_side_by_side(monkeypatch):
    monkeypatch.setattr(side_by_side, "SLAB", 1024)
    shapes = {"a": (3, 5), "scalar": (), "none": (0, 4), "large": (30, 20), "b": (100,), "c": (7, 7), "d": (120,)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    laid = SideBySide(shapes, "cpu")
    assert [len(piece) for piece in laid.pieces] == [32, 608, 112 + 64, 128], "of 256 elements, or one tensor"
    laid.copy_({name: t.bfloat16().float() for name, t in values.items()})
    laid.copy_(values)
    assert all(torch.equal(laid.views[name], t) for name, t in values.items())
    assert all(t.data_ptr() % 64 == laid.pieces[0].data_ptr() % 64 for t in laid.views.values() if t.numel())
    copy = laid.on_host()
    laid.zero_()
    assert not any(t.any() for t in laid.views.values())
    assert all(torch.equal(copy.views[name], t) for name, t in values.items())
    empty = SideBySide({}, "cpu")
    empty.copy_({})
    assert empty.on_host().views == {}


class Copies(TorchDispatchMode):
    """How often a tensor is copied, or allocated anew from another's."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func._schema.name in ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::empty_like")
        return func(*args, **(kwargs or {}))


def test_a_state_is_copied_once_a_step_and_in_pieces():
    made, pupil = taught()
    moment = pupil.moment()
    want = flatten_optimizer(pupil.optimizer.state_dict())
    assert moment.optimizer == want[0]
    assert list(moment.tensors) == [name for name in moment.tensors if name in want[1]]
    assert moment.tensors.keys() == want[1].keys() and all(
        torch.equal(moment.tensors[n], t) for n, t in want[1].items()
    )
    assert all(torch.equal(moment.shadow[n], p) and moment.shadow[n] is not p for n, p in pupil.shadow.items())
    again = pupil.moment()
    assert again.shadow is moment.shadow and again.tensors is moment.tensors, "nothing has changed"
    assert made.learn(*WHERE, adapter="a", lr=1e-2).success
    assert pupil.journal[-1].shadow is moment.shadow and pupil.moment().shadow is not moment.shadow
    with torch.no_grad():
        next(iter(pupil.shadow.values())).add_(1)
    with Copies() as seen:
        assert pupil.moment().shadow is not moment.shadow
    assert seen.n == 2, "one of the shadow, one of its moments"


@pytest.mark.parametrize("change", ["weights", "optimizer", "its step alone", "a loaded state", "no state"])
def test_whoever_changes_it_the_next_moment_shows_it(change):
    _, pupil = taught(2)
    before = pupil.moment()
    saved = {n: t.clone() for n, t in before.tensors.items()}
    first = next(iter(pupil.shadow.values()))
    if change == "weights":
        with torch.no_grad():
            first.mul_(2)
        assert torch.equal(pupil.moment().shadow[next(iter(pupil.shadow))], first)
    elif change == "optimizer":
        for p in pupil.shadow.values():
            p.grad = torch.ones_like(p)
        pupil.optimizer.step()
        after = pupil.moment()
        assert all(not torch.equal(after.shadow[n], t) for n, t in before.shadow.items())
        assert all(not torch.equal(after.tensors[n], t) for n, t in saved.items())
    elif change == "its step alone":
        pupil.optimizer.state[first]["step"].fill_(7)
        assert float(pupil.moment().tensors["optimizer.0.step"]) == 7
    elif change == "a loaded state":
        state = pupil.optimizer.state_dict()
        state["state"] = {i: {k: torch.full_like(v, 3) for k, v in s.items()} for i, s in state["state"].items()}
        pupil.optimizer.load_state_dict(state)
        assert all((t == 3).all() for t in pupil.moment().tensors.values())
    else:
        pupil.optimizer.load_state_dict({**pupil.optimizer.state_dict(), "state": {}})
        assert not pupil.moment().tensors
    assert all(torch.equal(before.tensors[n], t) for n, t in saved.items()), "an earlier moment stays what it was"
    pupil.go_back(before)
    assert all(torch.equal(p, before.shadow[n]) for n, p in pupil.shadow.items())
    assert all(torch.equal(pupil.moment().tensors[n], t) for n, t in saved.items())


def test_the_layers_of_a_learn_are_made_once(monkeypatch):
    made, _ = taught()
    made_now, real = [], bank._layers_of
    monkeypatch.setattr(bank, "_layers_of", lambda *a: (made_now.append(a[1]), real(*a))[1])
    first = made.bank.learning_layers((), "a")
    for _ in range(2):
        assert made.learn(*WHERE, adapter="a", lr=1e-2).success
    made.promote("a")
    assert made.bank.learning_layers((Use("a", 2),), "a") is first, "whatever version of it serves"
    assert made_now == []
    add(made, "b", HEAD, seed=9)
    beside = made.bank.learning_layers((Use("b", 1, 0.5),), "a")
    assert beside is not first and beside is made.bank.learning_layers((Use("a", 2), Use("b", 1, 0.5)), "a")
    assert made.bank.learning_layers((Use("b", 1),), "a") is not beside, "at another scale"
    made.remove("b")
    add(made, "b", HEAD, seed=10)
    assert made.bank.learning_layers((Use("b", 1, 0.5),), "a") is not beside, "another adapter of that name"


def test_an_adapter_that_is_made_again_learns_on_its_own_weights():
    made, _ = taught()
    made.remove("a")
    add(made, "a", SPEC, seed=3)
    plain, _ = taught(0)
    plain.remove("a")
    add(plain, "a", SPEC, seed=3)
    for e in (made, plain):
        assert e.learn(*WHERE, adapter="a", lr=1e-2).success
    assert all(torch.equal(p, plain.bank.shadow("a")[n]) for n, p in made.bank.shadow("a").items())


def test_memory_of_a_moment_serves_again_once_nobody_has_it(monkeypatch):
    rooms, real = [], SideBySide.host_room
    monkeypatch.setattr(SideBySide, "host_room", lambda self: (rooms.append(self), real(self))[1])
    made, pupil = taught(0, journal=2)
    states, kept = [], []
    for step in range(9):
        moment = pupil.moment()
        states.append({n: t.clone() for n, t in (*moment.shadow.items(), *moment.tensors.items())})
        if step == 3:
            kept.append((moment, states[-1]))
        del moment
        assert made.learn(*WHERE, adapter="a", lr=1e-2).success
    assert len(rooms) == 2 * 5, "the journal's, the newest one, the next, and one that somebody kept"
    for moment, state in kept:
        assert all(torch.equal(t, state[n]) for n, t in (*moment.shadow.items(), *moment.tensors.items()))
    made.undo("a", 2)
    after = pupil.moment()
    assert all(torch.equal(t, states[7][n]) for n, t in (*after.shadow.items(), *after.tensors.items()))


def test_an_adapter_that_does_not_learn_takes_no_memory_for_moments():
    made = engine()
    pupil = made.learner.pupil("a")
    assert not pupil.moment().tensors and pupil._moments is None


@pytest.mark.gpu
def test_on_a_gpu_it_is_pinned_and_waited_for():
    shapes = {"a": (300, 50), "b": (), "c": (40,)}
    laid = SideBySide(shapes, "cuda")
    values = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    laid.copy_(values)
    copy = laid.on_host()
    assert all(torch.equal(copy.views[n], t.cpu()) and copy.views[n].is_pinned() for n, t in values.items())
    laid.zero_()
    assert laid.on_host(copy) is copy and not any(t.any() for t in copy.views.values())
