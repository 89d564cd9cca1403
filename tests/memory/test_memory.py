"""`riftco memory`: what is alive at the peak, counted against tensors whose sizes are known."""

import json

import pytest
import support
import torch

from riftco.functional import swiglu
from riftco.memory import MemoryTrace
from riftco.memory.step import memory_of, trace_step
from riftco.models import Decoder
from riftco.models.config import DecoderConfig
from riftco.optim import Adam

SHAPE = dict(
    model_type="llama", vocab_size=259, hidden_size=32, intermediate_size=80, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
    tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip
DEVICES = support.device_params(("cpu", "cuda"))
KIB = 1024


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(256, 256, bias=False)
        self.b = torch.nn.Linear(256, 256, bias=False)

    def forward(self, x):
        return self.b(self.a(x).relu()).sum()


@pytest.mark.parametrize("device", DEVICES)
def test_every_byte_of_a_known_step(device):
    """Two 256 KiB weights, x and the relu are kept, a's own output dies when the relu is made."""
    model, x = Two().to(device.torch_device), torch.randn(64, 256, device=device.torch_device)
    trace = MemoryTrace(model, inputs={"x": x})
    with trace, trace.phase("forward"):
        loss = model(x)
    report = trace.report()
    weights, rows = 2 * 256 * KIB, 64 * KIB
    # at the peak: x, the relu beside b's output, and the loss
    assert report.peak_bytes == weights + 3 * rows + 4 and report.phase == "forward"
    assert report.kinds["parameter"] == weights and report.kinds["input"] == rows
    assert {r.op for r in report.tensors} >= {"leaf"} and report.leaf_bytes == weights + rows
    with trace, trace.phase("backward"):
        loss.backward()
    report = trace.report()
    assert report.kinds["gradient"] == weights and report.phase == "backward"
    # both weights and gradients, x; what else the last product needs has died but for its incoming gradient
    assert report.peak_bytes <= 2 * weights + 3 * rows
    assert {o for r in report.tensors for o in r.owners} >= {"a.weight", "gradient of a.weight", "x"}


@pytest.mark.parametrize("device", DEVICES)
def test_a_save_is_seen_while_it_lasts_with_its_line(device):
    x = torch.randn(128, 64, device=device.torch_device, requires_grad=True)
    trace = MemoryTrace(inputs={"x": x})
    with trace:
        gate, up = x * 2, x * 3
        out = swiglu(gate, up)
        del gate, up
        later = torch.zeros(1 << 20)
    assert later.nbytes == trace.bytes - 4 * 32 * KIB
    del later
    (line,) = (k for k in trace.report().saved if "swiglu" in k)
    assert trace.report().saved[line] == 2 * 32 * KIB
    rows = [r for r in trace.report().tensors if r.kind == "saved for backward"]
    assert len(rows) == 2 and all(r.sources == ("x",) and "test_memory.py" in r.where for r in rows)
    assert trace.bytes == 4 * 32 * KIB  # x, gate, up, out
    del out
    assert trace.bytes == 32 * KIB


def test_a_needless_save_shows():
    """An activation that is written by a composed product keeps a third tensor; one that is fused does not."""
    results = []
    for fn in (swiglu, lambda g, u: torch.nn.functional.silu(g) * u):
        x = torch.randn(128, 64, requires_grad=True)
        trace = MemoryTrace(inputs={"x": x})
        with trace:
            out = fn(x * 2, x * 3).square()
            later = torch.zeros(1 << 20)
        assert len(out) and len(later)
        results.append(sum(trace.report().saved.values()))
    # swiglu keeps gate, up; silu(g) * u keeps silu(g) too; the square keeps what it is given in both
    assert results == [3 * 32 * KIB, 4 * 32 * KIB]


def test_views_shared_storages_and_in_place_writes_count_once():
    trace = MemoryTrace()
    with trace:
        x = torch.zeros(1024)
        y = x.view(32, 32).t()[1:]
        y.add_(1)
        z = x.detach()
    assert trace.bytes == trace.peak == 4 * KIB
    assert [r.op for r in trace.report().tensors] == ["aten.zeros"]
    del x, y
    assert trace.bytes == 4 * KIB
    del z
    assert trace.bytes == 0 and trace.peak == 4 * KIB


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_step_of_a_decoder(device, config, method):
    report = memory_of(config, method=method, tokens=128, rank=4, top=12, device=device.torch_device, dtype="fp32")
    assert len(report.tensors) == 12 and report.peak_bytes == sum(report.kinds.values())
    assert [r.bytes for r in report.tensors] == sorted((r.bytes for r in report.tensors), reverse=True)
    trained = report.kinds["parameter"]
    # two moments for each parameter, and the step counts
    most = 3 * trained if method != "qlora" else trained + (8 << 20)
    assert 2 * trained <= report.kinds["optimizer state"] <= most
    assert (report.kinds.get("frozen weight", 0) > 100) == (method != "full")  # rotary frequencies are always there
    text = "\n".join(report.lines())
    for word in ("from ", "held by ", "input leaves", "kept for the backward", "kernels/swiglu/op.py"):
        assert word in text
    if device.name == "cuda":
        assert report.allocator_bytes >= report.peak_bytes


def test_buffers_inside_of_an_op_are_seen():
    """The loss's logits never leave its operator."""
    model = Decoder(DecoderConfig.from_hf(SHAPE))
    trace = MemoryTrace(model)
    with trace:
        model.loss(torch.zeros(1, 64, dtype=torch.int64), torch.ones(1, 64, dtype=torch.int64), n_labelled=64)
    inside = [s for s in trace.storages if s.where.startswith("kernels/linear_cross_entropy/")]
    assert max(s.nbytes for s in inside) >= 64 * 259 * 4
    assert all(s.died is not None for s in inside if s.nbytes == 64 * 259 * 4)


def test_checkpointing_lowers_what_is_kept():
    kept = []
    for mode in ("disabled", "block"):
        model = Decoder(DecoderConfig.from_hf(SHAPE), activation_checkpointing=mode)
        optimizer = Adam(model.parameters())
        report = trace_step(model, optimizer, torch.randint(259, (2, 64)))
        assert report.phase in ("forward", "backward")
        kept.append(report.peak_bytes)
    assert kept[1] < kept[0]


def test_the_trace_leaves_nothing_behind():
    """Results are the same bits, hooks are gone, an error inside does not stay on the module stack."""
    model, x = Two(), torch.randn(4, 256)
    want = model(x)
    trace = MemoryTrace(model)
    with trace:
        assert torch.equal(model(x), want)
    with pytest.raises(RuntimeError), trace:
        model(torch.randn(3, 5))
    before = len(trace.storages)
    model(x).backward()
    assert len(trace.storages) <= before + 2 and not trace._modules
    assert not torch.nn.modules.module._global_forward_hooks


def test_the_command(config, tmp_path):
    from typer.testing import CliRunner

    from riftco.cli.app import app

    shown = CliRunner().invoke(app, ["memory", "--model", config, "--method", "lora", "--tokens", "16", "--top", "3"])
    assert shown.exit_code == 0 and "the 3 largest tensors" in shown.stdout
    row = CliRunner().invoke(app, ["memory", "--model", config, "--tokens", "16", "--log-json"])
    assert json.loads(row.stdout)["peak_bytes"] > 0
    for bad, text in (
        (["--tokens", "1"], "--tokens must be a whole number of 2 or more; got 1"),
        (["--method", "dora"], "--method must be one of qlora, lora, full; got 'dora'"),
        (["--model", str(tmp_path / "config.jsn")], "no such file or folder"),
    ):
        refused = CliRunner().invoke(app, ["memory", "--model", config, *bad])
        assert refused.exit_code == 2 and text in refused.stderr, refused.stderr
