"""A file that is never held whole: every line once an epoch, resume, bad lines, memory."""

import itertools
import json
import pathlib
import re
import subprocess
import sys
import tracemalloc

import pytest
from data.fake_tokenizer import FakeTokenizer

from riftco.data import DataError, StreamLoader, load_examples
from riftco.data import stream as module

ROOT = pathlib.Path(__file__).parents[2]


class Chunks:
    """64 characters are a token: large files without large work."""

    eos_id = None

    def render_chat(self, messages, *, add_generation_prompt=False):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt

    def encode(self, text, *, add_special_tokens=False):
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text):
        spans = [m.span() for m in re.finditer(r"<\w+>|[^<]{1,64}", text)]
        return [len(text[a:b]) for a, b in spans], spans


def chat(i, words=3):
    return {"messages": [{"role": "user", "content": f"{i} " * words}, {"role": "assistant", "content": f"{i}."}]}


def write(path, count, bad=()):
    lines = ["{oops" if i in bad else json.dumps(chat(i)) for i in range(1, count + 1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def lines_of(loader, most=10_000):
    return [b.documents for b in itertools.islice(iter(loader.next, None), most)]


def test_every_line_once_an_epoch_with_the_same_tokens_as_in_memory(tmp_path):
    path = write(tmp_path / "x.jsonl", 50)
    tokenizer = FakeTokenizer()
    whole = {e.line: e for e in load_examples(path, tokenizer).examples}
    loader = StreamLoader(path, tokenizer, 200, seed=1, epochs=2, window=16)
    seen = []
    while (batch := loader.next()) is not None:
        assert batch.physical_tokens <= 200
        bounds = batch.cu_seqlens.tolist()
        for line, a, b in zip(batch.documents, bounds, bounds[1:], strict=False):
            assert tuple(batch.input_ids[a:b].tolist()) == whole[line].ids[:-1]
        seen += batch.documents
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(1, 51))
    assert seen[:50] != sorted(seen[:50])
    assert seen[:50] != seen[50:]


@pytest.mark.parametrize("bad", [(), (1, 2, 9, 10, 20)])
def test_it_resumes_anywhere(tmp_path, bad):
    path = write(tmp_path / "x.jsonl", 20, bad)

    def loader():
        return StreamLoader(path, FakeTokenizer(), 150, seed=3, epochs=2, window=4, skip_bad=True)

    whole = lines_of(loader())
    for cut in range(len(whole)):
        first, second = loader(), loader()
        for _ in range(cut):
            first.next()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert lines_of(second) == whole[cut:]
        if cut > len(whole) // 2:
            assert second.skipped == len(bad)
    again = loader()
    state = again.state_dict()
    for _ in range(5):
        again.next()
    again.load_state_dict(state)  # back over a window's end, in the same object
    assert lines_of(again) == whole


def test_a_bad_line_is_named_and_passed(tmp_path):
    path = write(tmp_path / "x.jsonl", 9, bad=(1, 4, 5, 9))
    loader = StreamLoader(path, FakeTokenizer(), 150, seed=0, epochs=1, window=4)
    seen, named = [], []
    while True:
        try:
            batch = loader.next()
        except DataError as why:
            assert str(why).startswith(f"{path}:")
            named.append(int(str(why).split(":")[1]))
            continue
        if batch is None:
            break
        seen += batch.documents
    assert named == [1, 4, 5, 9]
    assert sorted(seen) == [2, 3, 6, 7, 8]


def test_skipped_lines_are_counted_once(tmp_path):
    path = write(tmp_path / "x.jsonl", 30, bad=range(5, 25))
    loader = StreamLoader(path, FakeTokenizer(), 300, seed=0, epochs=3, window=4, skip_bad=True)
    assert len(sum(lines_of(loader), ())) == 30
    assert loader.skipped == 20
    assert len(loader.skipped_lines) == 10
    assert loader.skipped_lines[0].startswith(f"{path}:5: not valid JSON")


def test_what_cannot_be_streamed(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        StreamLoader(tmp_path / "no", FakeTokenizer(), 10, 0)
    with pytest.raises(DataError, match="is a folder"):
        StreamLoader(tmp_path, FakeTokenizer(), 10, 0)
    empty = tmp_path / "e.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="no examples"):
        StreamLoader(empty, FakeTokenizer(), 10, 0).next()
    path = write(tmp_path / "x.jsonl", 3)
    with pytest.raises(DataError, match=r"x.jsonl:1: the example has \d+ tokens, more than the 11 allowed"):
        StreamLoader(path, FakeTokenizer(), 10, 0).next()
    state = StreamLoader(path, FakeTokenizer(), 100, 0).state_dict()
    with pytest.raises(DataError, match="the saved position is of a stream with seed 0; this run's is 1"):
        StreamLoader(path, FakeTokenizer(), 100, 1).load_state_dict(state)


def test_an_endless_line_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LINE_BYTES", 1 << 20)
    path = tmp_path / "x.jsonl"
    with open(path, "w") as f:
        f.write(json.dumps(chat(1)) + "\n" + "x" * (10 << 20) + "\n" + json.dumps(chat(3)) + "\n")
    loader = StreamLoader(path, Chunks(), 100, 0, epochs=1, skip_bad=True)
    tracemalloc.start()
    try:
        assert sorted(sum(lines_of(loader), ())) == [1, 3]
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
    assert loader.skipped == 1


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(count):
        path = tmp_path / f"{count}.jsonl"
        line = json.dumps(chat(1, words=2000)) + "\n"  # 4 KB
        with open(path, "w") as f:
            f.writelines(itertools.repeat(line, count))
        loader = StreamLoader(path, Chunks(), 2048, 0, epochs=1, window=64)
        tracemalloc.start()
        try:
            assert sum(len(d) for d in lines_of(loader)) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(200), peak(2000)
    assert large < 1.2 * small + (1 << 18), (small, large)
    assert large < 4 << 20


BIG = """
import resource, sys
sys.path.insert(0, "tests")
from data.test_stream import Chunks
from riftco.data import StreamLoader
loader = StreamLoader(sys.argv[1], Chunks(), 16384, 0, epochs=1)
loader.next()
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lines = 0
while (batch := loader.next()) is not None:
    lines += len(batch.documents)
print(lines, start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


@pytest.mark.slow
def test_five_gigabytes_stream_in_bounded_memory(tmp_path):
    path = tmp_path / "big.jsonl"
    block = (json.dumps(chat(1, words=20_000)) + "\n") * 128
    with open(path, "w") as f:
        while f.tell() < 5 * 10**9:
            f.write(block)
    assert path.stat().st_size >= 5 * 10**9
    try:
        done = subprocess.run([sys.executable, "-c", BIG, path], cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        path.unlink()
    lines, start, grown = (int(n) for n in done.stdout.split())
    print(f"{lines} lines; {start} KiB after the first micro-batch, {grown} KiB more at the end")
    assert lines > 120_000
    assert grown < 256 << 10, f"{grown} KiB more than the {start} KiB after the first micro-batch"
