"""The bench on tiny cases: who is wrong is refused, who is absent is named, CSV and plots are complete."""

import csv
import importlib
import types

import pytest
import torch

from riftco.bench import peers, plot, run, timing
from riftco.kernels._cases import Case
from riftco.kernels.attention import cases as attention_cases
from riftco.kernels.rms_norm import cases as norm_cases

EXACT = peers.Peer("exact", lambda cases: cases.reference)
WRONG = peers.Peer("wrong", lambda cases: lambda inputs, case: {"y": 1.01 * cases.reference(inputs, case)["y"]})
RAISES = peers.Peer("raises", lambda cases: lambda inputs, case: 1 / 0)
ABSENT = peers.Peer("absent", lambda cases: cases.reference, ("no_such_module.inner",))
NO_OPTIONS = peers.Peer("narrow", lambda cases: cases.reference, options=())


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Runs rms_norm on two tiny cases -> (exit status, CSV rows, printed text)."""
    cases = types.SimpleNamespace(**vars(norm_cases))
    cases.BENCH = (Case("tiny", dict(B=2, T=32, C=64)), Case("offset", dict(B=2, T=32, C=16), dict(offset=1.0)))
    cases.CASES = norm_cases.CASES[:2]
    monkeypatch.setattr(run, "cases_of", lambda op: cases)
    monkeypatch.setattr(run, "peers_of", lambda op: (EXACT, WRONG, RAISES, ABSENT, NO_OPTIONS))
    monkeypatch.setattr(timing, "roofs", lambda *a: {"copy_gb_s": 10.0, "matmul_tflop_s": 1.0})

    def go(*argv):
        out = tmp_path / "out.csv"
        status = run.main(["rms_norm", "--out", str(out), "--seconds", "0.01", "--scale", "2", *argv])
        return status, plot.read(out), capsys.readouterr().out

    go.cases = cases
    return go


def test_correctness_comes_first(bench, tmp_path):
    status, rows, text = bench("--device", "cpu", "--plot")
    assert status == 0
    by = {(r["case"], r["pass"], r["peer"]): r for r in rows}
    for which in ("forward", "forward+backward"):
        for name in ("riftco", "exact"):
            row = by["tiny", which, name]
            assert row["status"] == "ok" and 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
            assert float(row["max_error"]) < 1e-5 and int(row["peak_bytes"]) >= 2 * 16 * 64 * 4
        for name, state, why in [
            ("wrong", "wrong", "y: err="),
            ("raises", "failed", "ZeroDivisionError"),
            ("absent", "missing", "no_such_module.inner not installed"),
        ]:
            row = by["tiny", which, name]
            assert row["status"] == state and why in row["why"] and row["median_ms"] == row["peak_bytes"] == ""
    assert by["offset", "forward", "narrow"]["why"] == "has no offset" and by["tiny", "forward", "narrow"]["median_ms"]
    assert "absent" in text and "missing" in text and "no_such_module.inner not installed" in text
    both = by["tiny", "forward+backward", "riftco"]
    shown = Case("tiny", dict(B=2, T=16, C=64))
    assert both["shape"] == "B2 T16 C64"
    assert float(both["gb_s"]) == pytest.approx(
        norm_cases.bytes_moved(shown, torch.float32) / float(both["median_ms"]) / 1e6
    )
    for column in ("machine", "date", "commit", "torch", "triton", "dtype", "device", "threads", "roof_copy_gb_s"):
        assert all(r[column] for r in rows), column
    with (tmp_path / "out.csv").open() as file:
        assert tuple(next(csv.reader(file))) == run.COLUMNS
    image = tmp_path / "out-rms_norm.png"
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and str(image) in text


def test_no_speed_while_the_op_is_red(bench):
    bench.cases.call = lambda inputs, case: {"y": norm_cases.call(inputs, case)["y"] * 1.001}
    status, rows, text = bench("--device", "cpu")
    assert status == 1 and "RED" in text and "odd sizes" in text
    assert [r["status"] for r in rows] == ["red"] and "y: err=" in rows[0]["why"]


def test_no_speed_where_only_the_benched_case_is_wrong(bench):
    def call(inputs, case):
        return {"y": norm_cases.call(inputs, case)["y"] * (2 if case.name == "tiny" else 1)}

    bench.cases.call = call
    status, rows, text = bench("--device", "cpu")
    assert status == 1
    tiny = [r for r in rows if r["case"] == "tiny"]
    assert {r["peer"]: r["status"] for r in tiny}["riftco"] == "wrong"
    assert all(r["median_ms"] == "" for r in tiny) and "not timed: riftco is wrong" in text
    assert any(r["median_ms"] for r in rows if r["case"] == "offset")


def test_a_second_run_of_the_day_keeps_the_rows_of_the_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "roofs", lambda *a: {"copy_gb_s": 10.0, "matmul_tflop_s": 1.0})
    how = ["rms_norm", "--device", "cpu", "--only", "SmolLM2", "--peers", "torch eager", "--seconds", "0.01"]
    for _ in range(3):
        assert run.main([*how, "--scale", "64"], folder=tmp_path) == 0
    first, *more = sorted(tmp_path.iterdir(), key=lambda p: (len(p.name), p.name))
    assert [p.name for p in more] == [f"{first.stem}-2.csv", f"{first.stem}-3.csv"]
    assert all(len(plot.read(p)) == 4 for p in (first, *more))
    lines = [s for s in capsys.readouterr().out.splitlines() if " ms " in s]
    assert len({s.index(" peak ") for s in lines}) == 1, "columns line up"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_emulated_devices_report_bytes_and_no_speed(bench):
    status, rows, _ = bench("--device", "cpu-triton", "--peers", "exact")
    assert status == 0 and {r["peer"] for r in rows} == {"riftco", "exact"}
    for row in rows:
        assert row["why"] == "not timed: emulated" and row["median_ms"] == row["tflop_s"] == ""
        assert int(row["peak_bytes"]) > 0


def test_an_op_without_gradients_has_a_rate(bench):
    bench.cases.GRADS = ()
    status, rows, _ = bench("--device", "cpu", "--peers")
    assert status == 0 and {r["peer"] for r in rows} == {"riftco"}
    assert all(r["pass"] == "forward" and float(r["gb_s"]) > 0 for r in rows)


def test_too_large_cases_are_named(bench):
    _, rows, text = bench("--device", "cpu", "--max-gflop", "1e-6")
    assert [r["status"] for r in rows] == ["skipped", "skipped"] and "above the limits" in text


def test_cases_and_passes_by_name(bench):
    assert {r["case"] for r in bench("--device", "cpu", "--peers", "--only", "off", "nothing")[1]} == {"offset"}
    rows = bench("--device", "cpu", "--peers", "--without", "off", "--passes", "forward+backward")[1]
    assert [(r["case"], r["pass"]) for r in rows] == [("tiny", "forward+backward")]
    assert int(rows[0]["peak_bytes"]) > int(rows[0]["grad_bytes"]) == 2 * 16 * 64 * 4 + 64 * 4


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_every_benched_loss_is_right_at_a_tiny_size(op):
    """riftco and plain torch, with the case's own options, and budgets small enough for several slices."""
    cases = run.cases_of(op)
    eager = next(p for p in peers.peers_of(op) if p.name == "torch eager")
    seen = set()
    for case in cases.BENCH:
        tiny = dict(B=1, T=24, C=64, V=96, R=4)
        options = {k: 4096 if k == "slice_bytes" else v for k, v in case.options.items()}
        small = Case(case.name, {k: tiny[k] for k in case.shape}, options)
        if (key := str((small.shape, options))) in seen:
            continue
        seen.add(key)
        for dtype in (torch.float32, torch.bfloat16):
            truth = run.Truth(cases, small, dtype, "cpu")
            assert truth.error_of(cases.call) < 0.05
            if not eager.missing("cpu", small):
                truth.error_of(eager.make(cases), run.PEER_SLACK[dtype])
    assert len(seen) == {"cross_entropy": 1, "linear_cross_entropy": 10}[op]


def test_memory_beside_time(tmp_path):
    """Budgets of a case are one line; peers of the case itself are points; the bars leave budgets out."""
    rows = []
    for case, peer, ms, peak in [
        ("head", "riftco", 3, 260), ("head", "Liger", 5, 63), ("head, 64 MiB", "riftco", 4, 64),
        ("head, 256 MiB", "riftco", 3, 256), ("other, 64 MiB", "riftco", 2, 60),
    ]:  # fmt: skip
        row = dict.fromkeys(run.COLUMNS, "1") | {"op": "o", "case": case, "peer": peer, "pass": "forward+backward"}
        rows.append(row | {"median_ms": ms, "p10_ms": ms, "p90_ms": ms, "tflop_s": 1 / ms, "gb_s": 1 / ms})
        rows[-1] |= {"peak_bytes": (peak + 10) << 20, "grad_bytes": 10 << 20}
        rows.append(rows[-1] | {"pass": "forward", "peak_bytes": 0})
    path = tmp_path / "x.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, run.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    assert plot._extra_mib({k: str(v) for k, v in rows[0].items()}) == 260
    assert [p.name for p in plot.plot_memory(path)] == ["x-o-memory.png"]
    rows[1] |= {"gb_s": ""}  # of a part of an op's work bytes are not counted
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, run.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    assert [p.name for p in plot.plot(path)] == ["x-o.png", "x-o-forward.png"]


def test_unknown_op(capsys):
    with pytest.raises(SystemExit):
        run.main(["no_such_op"])
    assert "unknown ops no_such_op" in capsys.readouterr().err


def test_every_room_can_be_benched():
    """Cases scale down, counts are positive, and the peers that can run here agree with the spec."""
    for op in run.ROOMS:
        cases = run.cases_of(op)
        assert cases.BENCH, op
        for case in cases.BENCH:
            tiny = run.small(cases, case, "cpu")
            assert 0 < cases.flops(tiny) <= cases.flops(case) and cases.bytes_moved(case, torch.bfloat16) > 0, op
        for peer in peers.peers_of(op):
            assert isinstance(peer.missing("cpu", cases.BENCH[0]), str)


@pytest.mark.parametrize("op,name", [(op, p.name) for op in peers.PEERS for p in peers.PEERS[op] if op in run.ROOMS])
def test_peers_here_agree_with_the_spec(op, name):
    cases = run.cases_of(op)
    peer = next(p for p in peers.peers_of(op) if p.name == name)
    able = [c for c in cases.CASES if not peer.missing("cpu", c)]
    if not able or name == "torch.compile":
        pytest.skip(f"{name} does not run here" if not able else "compiling is left to the bench")
    for case in able[:3]:
        run.Truth(cases, case, torch.float32, "cpu").error_of(peer.make(cases), run.PEER_SLACK[torch.float32])


def test_a_peer_that_overwrites_its_inputs_spoils_nobody_elses(monkeypatch):
    case = Case("c", dict(B=1, T=16, C=8))

    def make(cases):
        def call(inputs, case):
            out = cases.reference({**inputs, "x": 1.0 * inputs["x"]}, case)
            inputs["x"].data.zero_()
            seen.append(inputs["x"].data_ptr())
            return out

        return call

    def riftco(inputs, case):
        assert inputs["x"].detach().abs().sum() > 0
        return norm_cases.call(inputs, case)

    seen: list[int] = []
    cases = types.SimpleNamespace(**{**vars(norm_cases), "call": riftco})
    peer = peers.Peer("spoils", make, overwrites=True)
    rows = list(run.bench_case(cases, case, (peer,), torch.float32, run.TARGETS["cpu"], 0.0))
    assert [r["status"] for r in rows] == ["ok"] * 4 and seen


def test_scaling_keeps_what_belongs_together():
    case = Case("c", dict(B=1, T=4096, S=4096, V=100))
    assert run.scaled(norm_cases, case, 8).shape == dict(B=1, T=512, S=512, V=100)
    assert run.scaled(norm_cases, case, 10**9).shape == dict(B=1, T=16, S=16, V=100)
    packed = Case("p", dict(T=4096, S=4096), dict(cu_q=(0, 1024, 4096), kv_grad_start=3072, window=(9, None)))
    assert run.scaled(norm_cases, packed, 8) == packed
    assert run.scaled(attention_cases, packed, 4) == Case(
        "p", dict(T=1024, S=1024), dict(cu_q=(0, 256, 1024), kv_grad_start=768, window=(9, None))
    )
    masked = Case("m", dict(B=2, T=64, S=64), dict(mask=(2, 1, 64, 64)))
    assert run.scaled(attention_cases, masked, 2) == masked


def test_launches_are_interleaved_and_the_order_rotates():
    seen = []
    functions = {n: (lambda n=n: seen.append(n)) for n in "abc"}
    times = timing.interleaved(functions, "cpu", seconds=0, least=4)
    rounds = ["".join(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert rounds[-4:] == ["abc", "bca", "cab", "abc"] and times["a"].launches == 4


def test_peak_bytes_counts_what_was_alive_at_once():
    x = torch.ones(1000, 1000)

    def function():
        y = x + 1
        z = y * 2
        del y
        return z.exp()

    assert timing.peak_bytes(function, "cpu") == pytest.approx(8_000_000, abs=100)


def test_summary():
    t = timing.summary([5.0, 1.0, 2.0, 3.0, 4.0, 100.0, 2.5, 3.5, 1.5, 4.5, 0.5])
    assert (t.median_ms, t.p10_ms, t.p90_ms, t.launches) == (3.0, 1.0, 5.0, 11)


@pytest.mark.gpu
def test_time_of_short_work_is_the_device_s(tmp_path):
    out = tmp_path / "gpu.csv"
    assert run.main(["rms_norm", "--scale", "64", "--seconds", "0.1", "--peers", "torch eager", "--out", str(out)]) == 0
    rows = [r for r in plot.read(out) if r["status"] == "ok"]
    ours = [r for r in rows if r["peer"] == "riftco"]
    # of all cases together: other work on the GPU may slow any one of them
    assert ours and 0 < sum(float(r["median_ms"]) for r in ours) < sum(float(r["eager_ms"]) for r in ours)


def test_entry_script():
    script = importlib.util.spec_from_file_location("bench_entry", run.pathlib.Path("bench/run.py"))
    module = importlib.util.module_from_spec(script)
    script.loader.exec_module(module)
    assert module.main is run.main and module.HERE.name == "bench"
