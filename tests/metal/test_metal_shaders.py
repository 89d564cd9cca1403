"""Every Metal shader: numerics under several schedules, races, memory, address spaces.

Walks the rooms that have a launcher in riftco/metal: a new shader needs no line here, but for what no case reaches
(beyond_cases.py).
"""

import importlib
import importlib.util
import itertools
import re

import metal_emulator
import pytest
import support
import torch
from beyond_cases import BEYOND, check_beyond
from shaders_of_rooms import ROOM_OF

import riftco.metal
from riftco.kernels._check import inputs_of, loss_on, outputs_and_grads, to, within_budget

ROOMS = {name: cases for name, cases in support.rooms().items() if importlib.util.find_spec(f"riftco.metal.{name}")}
SHADERS = list(ROOM_OF)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = (0, 1, 2, 3, 4)
WATCHED = 4  # launches of a kernel that a sanitizer replays in the default run
MOST_GROUPS = 64  # of a replay, whose threads' stacks all live at once; the kernels stride over what is left
DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")


def small(cases):
    return [c for c in cases.CASES if not c.slow and support.serves(cases, DEVICE.name, c)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("room", ROOMS)
def test_every_schedule(room, dtype):
    """All outputs of all cases, whatever the order in which the threads of a threadgroup run."""
    cases = ROOMS[room]
    for case in small(cases):
        inputs = inputs_of(cases, case, dtype)
        oracle, near = (
            outputs_and_grads(cases.reference, cases, case, to(inputs, t, "cpu"))
            for t in (torch.float64, torch.float32)
        )
        for seed in SEEDS:
            with metal_emulator.schedule(seed), DEVICE.use(), support.poisoned():
                got = outputs_and_grads(cases.call, cases, case, to(inputs, dtype, "cpu"))
            for name in oracle:
                roundings = cases.ROUNDINGS.get(name, 0)
                what = f"{case.name}, seed {seed}: {name}"
                within_budget(what, got[name], oracle[name], near[name], dtype, roundings, loss=loss_on("mps"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("room", BEYOND)
def test_what_no_case_reaches(room, dtype):
    """Beside the cases: as the spec, under every schedule."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        with metal_emulator.schedule(seed):
            check_beyond(room, dtype, DEVICE)


@pytest.fixture(scope="module", params=SHADERS)
def jobs(request):
    """What the launch code asks Metal to do for all cases of a room; every kernel of the shader must be among it."""
    room, jobs = ROOM_OF[request.param], []
    cases = ROOMS[room]
    for dtype in DTYPES:
        for case in small(cases):
            inputs = to(inputs_of(cases, case, dtype), dtype, "cpu")
            with DEVICE.use(), support.poisoned(), metal_emulator.recording() as launched:
                outputs_and_grads(cases.call, cases, case, inputs)
            jobs += launched
        with DEVICE.use(), support.poisoned(), metal_emulator.recording() as launched:
            BEYOND.get(room, lambda dtype: None)(dtype)
        jobs += launched
    source = riftco.metal.source(request.param)
    jobs = [j for j in jobs if j.source == source]
    missing = set(metal_emulator.translated(source).kernels) - {j.kernel for j in jobs}
    assert not missing, f"no case launches {missing}"
    return jobs


def replay_all(jobs, sanitizer, at_most_threads, count):
    if reason := metal_emulator.why_not_sanitizer(sanitizer):
        pytest.skip(reason)
    watched = [j for j in jobs if j.threads <= at_most_threads]
    assert {j.kernel for j in watched} == {j.kernel for j in jobs}
    # the launches with most threads first, and among them those with more than one threadgroup and least work
    watched.sort(key=lambda j: (j.kernel, -j.threads, j.grid[0] == j.group[0], sum(len(a.data) for a in j.arguments)))
    for kernel, same in itertools.groupby(watched, key=lambda j: j.kernel):
        wrote = False
        for job in itertools.islice(same, count):
            replay = job.with_groups(min(job.grid[0] // job.group[0], MOST_GROUPS)).replay(sanitizer, seed=2)
            assert replay.status == 0, f"{kernel}\n{replay.report}"
            wrote |= replay.buffers != tuple(a.data for a in job.arguments)
        assert wrote, f"{kernel} wrote nothing"  # a refused step of Adam alone does not


@pytest.mark.parametrize("count", [WATCHED, pytest.param(None, marks=pytest.mark.slow, id="all")])
def test_no_races(jobs, count):
    replay_all(jobs, "thread", 224, count)


@pytest.mark.parametrize("count", [WATCHED, pytest.param(None, marks=pytest.mark.slow, id="all")])
def test_no_access_out_of_bounds(jobs, count):
    replay_all(jobs, "address", 1024, count)


@pytest.mark.parametrize("shader", SHADERS)
def test_language(shader):
    """Address spaces agree, the text is C++14, and ASCII, as PyTorch hands it to Metal."""
    assert metal_emulator.lint(riftco.metal.source(shader)) == ""
    assert riftco.metal.source(shader).isascii()


@pytest.mark.parametrize("shader", SHADERS)
def test_errors_name_the_file_and_line(shader):
    """The #line marks of an inlined header lead back to the file on disk."""
    source = riftco.metal.source(shader)
    *_, brace = re.finditer(r"^};?\n", source, re.M)
    *_, mark = re.finditer(r'^#line (\d+) "([\w.]+)"\n', source[: brace.start()], re.M)
    line = int(mark[1]) + source.count("\n", mark.end(), brace.start())
    assert (riftco.metal.CHECKOUT / mark[2]).read_text().splitlines()[line - 1] == brace[0].strip()
    with pytest.raises(metal_emulator.CompileError, match=rf"{mark[2]}:{line + 1}:"):
        metal_emulator.library(f"{source[: brace.end()]}not_a_word;\n{source[brace.end() :]}")
