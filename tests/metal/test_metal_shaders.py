"""Every Metal shader: numerics under several schedules, races, memory, address spaces.

Walks the rooms that have a launcher in riftco/metal: a new shader needs no line here.
"""

import importlib
import importlib.util
import itertools

import metal_emulator
import pytest
import support
import torch

import riftco.metal

ROOMS = {name: cases for name, cases in support.rooms().items() if importlib.util.find_spec(f"riftco.metal.{name}")}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = (0, 1, 2, 3, 4)
DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")


def small(cases):
    return [c for c in cases.CASES if not c.slow and support.serves(cases, DEVICE.name, c)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", ROOMS)
def test_every_schedule(room, dtype):
    """All outputs of all cases, whatever the order in which the threads of a threadgroup run."""
    for seed, case in itertools.product(SEEDS, small(ROOMS[room])):
        with metal_emulator.schedule(seed):
            support.check_case(ROOMS[room], case, dtype, DEVICE)


@pytest.fixture(scope="module", params=ROOMS)
def jobs(request):
    """What the launch code asks Metal to do for all cases of a room; every kernel of the shader must be among it."""
    cases, jobs = ROOMS[request.param], []
    for case, dtype in itertools.product(small(cases), DTYPES):
        inputs = support.to(support.inputs_of(cases, case, dtype), dtype, "cpu")
        with DEVICE.use(), support.poisoned(), metal_emulator.recording() as launched:
            support.outputs_and_grads(cases.call, cases, case, inputs)
        jobs += launched
    missing = set(metal_emulator.translated(riftco.metal.source(request.param)).kernels) - {j.kernel for j in jobs}
    assert not missing, f"no case launches {missing}"
    return jobs


def replay_all(jobs, sanitizer, at_most_threads):
    if reason := metal_emulator.why_not_sanitizer(sanitizer):
        pytest.skip(reason)
    watched = [j for j in jobs if j.threads <= at_most_threads]
    assert {j.kernel for j in watched} == {j.kernel for j in jobs}
    for job in watched:
        replay = job.replay(sanitizer, seed=2)
        assert replay.status == 0, f"{job.kernel}\n{replay.report}"
        assert replay.buffers != tuple(a.data for a in job.arguments), f"{job.kernel} wrote nothing"


def test_no_races(jobs):
    replay_all(jobs, "thread", at_most_threads=224)


def test_no_access_out_of_bounds(jobs):
    replay_all(jobs, "address", at_most_threads=1024)


@pytest.mark.parametrize("room", ROOMS)
def test_language(room):
    """Address spaces agree, the text is C++14, and ASCII, as PyTorch hands it to Metal."""
    assert metal_emulator.lint(riftco.metal.source(room)) == ""
    assert riftco.metal.source(room).isascii()


@pytest.mark.parametrize("room", ROOMS)
def test_errors_name_the_file_and_line(room):
    """The #line marks of an inlined header lead back to the file on disk."""
    source = riftco.metal.source(room)
    file = (riftco.metal.CHECKOUT / f"{room}.metal").read_text()
    last = max(i for i, line in enumerate(file.splitlines(), 1) if line.strip() == "}")
    broken = "}\nnot_a_word;\n".join(source.rsplit("}\n", 1))
    with pytest.raises(metal_emulator.CompileError, match=rf"{room}\.metal:{last + 1}:"):
        metal_emulator.library(broken)
