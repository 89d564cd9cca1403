"""The compiled decoding on processors with fewer registers, and with bugs planted in its source, which are found."""

import os
import shutil

import pytest
import torch
from test_compiled import RUNS, agree, decoder, packed

from riftco import cpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(cpu.why_not()), reason=cpu.why_not())]
X86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
PROCESSORS = {"avx2": ("-mavx2", "-mfma", "-mf16c"), "loops": ()}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def built_anew(monkeypatch, tmp_path):
    """Build after changes of riftco.cpu, into a place of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu._attempt.cache_clear()
    yield monkeypatch
    cpu._attempt.cache_clear()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors(built_anew, processor):
    if processor != "loops" and not X86:
        pytest.skip("not an x86 processor with AVX2")
    flags = [f for f in cpu.FLAGS if f != "-march=native"]
    built_anew.setattr(cpu, "FLAGS", (*flags, *PROCESSORS[processor]))
    for family in ("llama-biases", "gemma3", "phi3-partial-rope"):
        agree(decoder(family))
    for cache in ("float16", "bfloat16", "q8_0"):
        agree(decoder("llama-3.1"), dtype=cache, most=1e-5)
    for format in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        agree(packed(decoder("llama", hidden_size=256, intermediate_size=512), format), RUNS[:4], most=1e-10)


BUGS = [
    ("step.cpp", "b * c[i] + a * si[i]", "b * c[i] - a * si[i]"),  # the rotation
    ("step.cpp", "position - l.left)", "position - l.left + 1)"),  # a window one too short
    ("step.cpp", "total += weight * *of.total;", "total += *of.total;"),  # parts that are not weighed
    ("step.cpp", "j <= r; j++", "j < s.rows; j++"),  # new rows that see later ones
    ("attention.h", "position % c.page", "position"),  # pages
    ("product.h", "n0 + i, y + i, ldy);\n    for", "n0, y + i, ldy);\n    for"),  # the same rows of W again
]


@pytest.mark.parametrize("file, old, new", BUGS, ids=[old for _, old, _ in BUGS])
def test_planted_bugs_are_found(built_anew, tmp_path, file, old, new):
    source = tmp_path / "source"
    shutil.copytree(cpu.sources(), source)
    text = (source / file).read_text()
    assert text.count(old) == 1
    (source / file).write_text(text.replace(old, new))
    built_anew.setattr(cpu, "sources", lambda: source)
    built_anew.setattr(cpu, "FLAGS", tuple("-O1" if f == "-O3" else f for f in cpu.FLAGS))
    with pytest.raises(AssertionError):
        agree(decoder("gemma3"), layout="paged", page_size=5)


@pytest.mark.parametrize("damage", [0, 40, 4096, None])
def test_a_damaged_library_is_built_again(built_anew, damage):
    """A disk that lost its end, or all of it; a build that was killed leaves nothing for good."""
    place = cpu._built()
    whole = place.read_bytes()
    left, fresh = place.with_name(f"{cpu.BUILDING}killed"), place.with_name(f"{cpu.BUILDING}running")
    for folder in (left, fresh):
        folder.mkdir()
        (folder / "step.o").write_bytes(b"half")
    os.utime(left, (1, 1))
    place.write_bytes(b"nonsense" * 100 if damage is None else whole[:damage])
    cpu.library()
    assert place.read_bytes() == whole
    assert sorted(f.name for f in place.parent.iterdir()) == sorted([fresh.name, place.name])
