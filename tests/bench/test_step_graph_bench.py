"""The step graph's bench on a tiny step: losses are compared before anything is timed, rows are complete."""

import pytest
import torch
from train.test_step_graph import StandIn

from riftco.bench import plot, step_graph


@pytest.fixture
def bench(tmp_path, capsys):
    def go(*argv):
        out = tmp_path / "rows.csv"
        status = step_graph.main(["--only", "tiny", "--steps", "3", "--device", "cpu", "--out", str(out), *argv])
        return status, {row["variant"]: row for row in plot.read(out)}, capsys.readouterr().out

    return go


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_rows(bench, monkeypatch):
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: real(self, backend="aot_eager"))
    status, rows, text = bench("--variants", *step_graph.VARIANTS)
    assert status == 0 and tuple(rows) == step_graph.VARIANTS
    assert rows["step graph"]["status"] == "missing" and "need a CUDA device" in rows["step graph"]["why"]
    assert rows["compiled blocks"]["status"] == "ok", rows["compiled blocks"]["why"]
    for name in ("eager", "compiled blocks"):
        row = rows[name]
        assert float(row["tokens_s"]) == pytest.approx(64e3 / float(row["median_ms"]))
        assert float(row["host_ms"]) > 0 and row["steps"] == "3" and float(row["peak_gib"]) > 0
        assert float(row["off_by"]) <= 1e-4
        assert all(row[c] for c in ("machine", "date", "commit", "torch", "dtype", "device"))
    assert tuple(rows["eager"]) == step_graph.COLUMNS and "tokens/s" in text


def test_other_losses_are_not_timed(bench, monkeypatch):
    real = step_graph.trainer

    def other(step, variant, *rest):
        made = real(step, "eager", *rest)
        if variant != "eager":
            with torch.no_grad():
                made.model.lm_head.weight.mul_(1.01)
        return made

    monkeypatch.setattr(step_graph, "trainer", other)
    status, rows, text = bench("--variants", "eager", "compiled blocks")
    assert status == 0
    row = rows["compiled blocks"]
    assert row["status"] == "wrong" and "off by" in row["why"] and row["median_ms"] == "" and row["why"] in text


def test_a_step_that_fails_is_named(bench, monkeypatch):
    def broken(*rest):
        raise RuntimeError("no such step")

    monkeypatch.setattr(step_graph, "trainer", broken)
    status, rows, _ = bench()
    assert status == 1 and rows["eager"]["status"] == "failed" and "no such step" in rows["eager"]["why"]
    assert tuple(rows) == ("eager", "step graph")
    _, rows, _ = bench("--variants", "compiled blocks")
    assert rows["compiled blocks"]["why"] == "there are no eager losses to compare with"


def test_a_replayed_step_has_its_capture_and_memory_in_its_row(bench, monkeypatch):
    real = step_graph.trainer

    def recorded(*rest):
        made = real(*rest)
        if made.step_graph is not None:
            made.step_graph._capture = StandIn(made.model)
        return made

    monkeypatch.setattr(step_graph, "trainer", recorded)
    monkeypatch.setattr(step_graph.CudaCapture, "why_not", lambda self, device: "")
    status, rows, text = bench()
    eager, graph = rows["eager"], rows["step graph"]
    assert status == 0 and graph["status"] == "ok" and float(graph["off_by"]) == 0, text
    assert float(graph["capture_s"]) > 0 == float(eager["capture_s"]) and float(graph["pool_gib"]) == 2**-10
    assert float(graph["extra_gib"]) == pytest.approx(float(graph["peak_gib"]) - float(eager["peak_gib"]))


def test_what_the_host_asks_for_is_counted():
    names = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaGraphLaunch"]
    others = ["void kernel(float*)", "cudaDeviceSynchronize", "Memcpy DtoD (Device -> Device)", "cudaEventRecord"]
    assert step_graph.count_launches(names + others) == len(names)


@pytest.mark.gpu
def test_a_graph_is_measured_on_a_gpu(tmp_path):
    out = tmp_path / "rows.csv"
    assert step_graph.main(["--only", "tiny", "--variants", "eager", "step graph", "--out", str(out)]) == 0
    rows = {row["variant"]: row for row in plot.read(out)}
    assert float(rows["step graph"]["off_by"]) == 0 and float(rows["step graph"]["pool_gib"]) > 0
    assert 0 < int(rows["step graph"]["launches"]) < int(rows["eager"]["launches"])
    print({name: (row["median_ms"], row["host_ms"]) for name, row in rows.items()})
