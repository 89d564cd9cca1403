"""Planted bugs, each caught by what it is meant for: the tables of planted.py, and every barrier and every threadgroup
array of every shader.
"""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import metal_emulator
import planted
import pytest
import support
import torch
from beyond_cases import BEYOND, check_beyond
from shaders_of_rooms import ROOM_OF

import riftco.metal
from riftco.kernels._check import inputs_of, outputs_and_grads, to

ROOMS = support.rooms()
SHADERS = sorted(ROOM_OF)
DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def rows(table):
    return [pytest.param(s, *row, id=f"{s}-{i}") for s, found in table.items() for i, row in enumerate(found)]


def float32_only(source: str) -> str:
    """The shader without the kernels of 16-bit dtypes and, where there are several widths, of the wide ones: quicker
    to compile."""
    return re.sub(r'^INSTANTIATE\w*\(((128|256),|[^)]*"(f16|bf16))[^)]*\)\n', "\n", source, flags=re.M)


def changed(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    return float32_only(source.replace(old, new))


def found_case(shader: str, name: str):
    return next(c for c in ROOMS[ROOM_OF[shader]].CASES if c.name == name)


@functools.cache
def jobs(shader: str, name: str | None = None) -> tuple[metal_emulator.Job, ...]:
    """The float32 launches of one case, or of all of them and of what lies beyond."""
    cases, launched = ROOMS[ROOM_OF[shader]], []
    torch.manual_seed(0)
    for case in [c for c in cases.CASES if (not c.slow if name is None else c.name == name)]:
        inputs = to(inputs_of(cases, case, torch.float32), torch.float32, "cpu")
        with DEVICE.use(), support.poisoned(), metal_emulator.recording() as some:
            outputs_and_grads(cases.call, cases, case, inputs)
        launched += some
    if name in (None, "beyond") and ROOM_OF[shader] in BEYOND:
        with DEVICE.use(), support.poisoned(), metal_emulator.recording() as some:
            BEYOND[ROOM_OF[shader]](torch.float32)
        launched += some
    source = riftco.metal.source(shader)
    return tuple(j for j in launched if j.source == source and j.threads <= 224)


def smallest_first(shader: str) -> list[metal_emulator.Job]:
    """A few launches of each kernel, those with little work and more than one simdgroup first."""
    ordered = sorted(jobs(shader), key=lambda j: (j.threads <= 32, sum(len(a.data) for a in j.arguments)))
    kernels: dict[str, list] = {}
    for job in ordered:
        kernels.setdefault(job.kernel, []).append(job)
    return [job for i in range(6) for same in kernels.values() for job in same[i : i + 1]]


def needs(sanitizer: str) -> None:
    if reason := metal_emulator.why_not_sanitizer(sanitizer):
        pytest.skip(reason)


@pytest.mark.parametrize("shader,old,new,case", rows(planted.NUMBERS))
def test_wrong_numbers_are_caught(shader, old, new, case, monkeypatch):
    broken = changed(riftco.metal.source(shader), old, new)
    real = riftco.metal.source
    monkeypatch.setattr(riftco.metal, "source", lambda name: broken if name == shader else real(name))
    with pytest.raises(AssertionError):
        if case != "beyond":
            support.check_case(ROOMS[ROOM_OF[shader]], found_case(shader, case), torch.float32, DEVICE)
        else:
            check_beyond(ROOM_OF[shader], torch.float32, DEVICE)


@pytest.mark.parametrize("shader,old,new,case", rows(planted.OUT_OF_BOUNDS))
def test_an_access_out_of_bounds_is_caught(shader, old, new, case):
    needs("address")
    broken = changed(riftco.metal.source(shader), old, new)
    reports = [j.with_source(broken).replay("address").report for j in jobs(shader, case)]
    assert any("heap-buffer-overflow" in r or "AddressSanitizer: SEGV" in r for r in reports), reports


@pytest.mark.parametrize("shader,old,new", rows(planted.ADDRESS_SPACES))
def test_the_wrong_address_space_is_caught(shader, old, new):
    errors = metal_emulator.lint(changed(riftco.metal.source(shader), old, new))
    assert "address space" in errors or "'threadgroup " in errors, errors


def barriers(sampled: bool = False):
    """Every barrier of every file, as its places in the shaders that have it: [(shader, position in the source)]. Of a
    sample all but the first of each file are slow."""
    places: dict[str, list] = {}
    for shader in SHADERS:
        source, count = riftco.metal.source(shader), {}
        for m in re.finditer(re.escape(BARRIER), source):
            file = re.findall(r'#line \d+ "([\w.]+)"', source[: m.start()])[-1]
            number = count[file] = count.get(file, -1) + 1
            places.setdefault(f"{file}-{number}", []).append((shader, m.start()))
    return [
        pytest.param(where, id=name, marks=[pytest.mark.slow] if sampled and not name.endswith("-0") else [])
        for name, where in places.items()
    ]


@pytest.mark.parametrize("places", barriers())
def test_without_any_one_barrier_there_is_a_race(places):
    """In one at least of the shaders that have it."""
    needs("thread")
    for shader, at in places:
        source = riftco.metal.source(shader)
        broken = float32_only(source[:at] + source[at + len(BARRIER) :])
        for job in smallest_first(shader):
            for same in (job, job.with_groups(1)):  # one threadgroup takes all the work: the next piece reuses memory
                if "data race" in same.with_source(broken).replay("thread").report:
                    return
    pytest.fail("no launch needs this barrier")


@pytest.mark.parametrize("places", barriers(sampled=True))
def test_a_divergent_barrier_is_caught(places):
    for shader, at in places:
        source = riftco.metal.source(shader)
        function = source[: source.index("{\n", max(source.rfind("[[kernel]]", 0, at), source.rfind("inline ", 0, at)))]
        condition = "simdgroup == 0" if "uint simdgroup" in function[-900:] else "thread_index < 32"
        broken = float32_only(f"{source[:at]}if ({condition}) {source[at:]}")
        for job in smallest_first(shader):
            if job.threads > 32 and "wait at" in job.with_source(broken).replay("none").report:
                return
    pytest.fail("no launch noticed")


def arrays():
    declared = re.compile(r"^  threadgroup \w+ \w+\[([^\]]+)\];", re.M)
    return [
        pytest.param(shader, m.start(1), m.end(1), id=f"{shader}-{number}")
        for shader in SHADERS
        for number, m in enumerate(declared.finditer(riftco.metal.source(shader)))
    ]


@pytest.mark.parametrize("shader,start,end", arrays())
def test_an_oversized_threadgroup_array_is_caught(shader, start, end):
    source = riftco.metal.source(shader)
    broken = float32_only(f"{source[:start]}8193{source[end:]}")
    reports = (j.with_source(broken).replay("none").report for j in smallest_first(shader))
    assert any("more than 32768" in r for r in reports)


@pytest.mark.parametrize(
    "old,new,caught",
    [
        ("for (const Tensor& t : outputs)", "for (const Tensor& t : inputs)", "buffer"),
        ("unsigned index = 0;", "unsigned index = 1;", r"buffer\(0\) was not set"),
        pytest.param("numbers.data(), 8 * numbers.size()", "numbers.data() + 1, 8 * (numbers.size() - 1)", "Error",
                     marks=pytest.mark.slow),
    ],
    ids=["inputs for outputs", "all one further", "numbers shifted"],
)  # fmt: skip
def test_a_wrong_buffer_index_in_the_launch_code_is_caught(tmp_path, old, new, caught):
    """In a process of its own: an operator library can be loaded once."""
    csrc = shutil.copytree(metal_emulator.CSRC, tmp_path / "csrc")
    text = (csrc / "launch.cpp").read_text()
    assert text.count(old) == 1
    (csrc / "launch.cpp").write_text(text.replace(old, new))
    tests = pathlib.Path(__file__).parents[1]
    code = f"""
import pathlib, support, metal_emulator, torch
from riftco.kernels.nf4 import cases
device = next(d for d in support.DEVICES if d.name == "mps-emulated")
assert device.available
metal_emulator.install(pathlib.Path({str(csrc)!r}))
support.check_case(cases, next(c for c in cases.CASES if c.name == "blocks across rows"), torch.float32, device)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and (re.search(caught, done.stderr) or done.returncode < 0), done.stderr
