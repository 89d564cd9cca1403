"""Training and evaluation on XLA: the losses of a CPU, one graph a step, nothing compiled after the second."""

from collections.abc import Callable

import pytest
import support
import torch
from xla_graph import recorded

from riftco import tpu
from riftco.adapters import LoraSpec, apply_lora
from riftco.data import Buckets, Example, Loader, pack
from riftco.models import Decoder
from riftco.nn import NF4Linear
from riftco.optim import Adam
from riftco.train import Ranks, Schedule, Trainer, evaluate, finetune, tiny
from riftco.train.config import ConfigError, FinetuneConfig
from riftco.train.run import Reporter


class Counting(Reporter):
    """Compiled graphs so far at each step and evaluation."""

    def __init__(self):
        self.compiled, self.fallbacks = [], set()

    def _count(self):
        import torch_xla.debug.metrics as metrics

        data = metrics.metric_data("CompileTime")
        self.compiled.append(data[0] if data else 0)
        self.fallbacks |= {name for name in metrics.counter_names() if name.startswith("aten::")}

    def metric(self, metric):
        self._count()

    def evaluation(self, name, result):
        self._count()


@support.xla
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_train_tiny_follows_the_cpu(device, method):
    """From the same weights: each loss, norm and evaluation; one graph a step, none new after the second."""
    options = {"steps": 12, "method": method, "attention": "flash"}
    if method == "qlora":
        options["activation_checkpointing"] = "block"
    if method == "lora":
        options["attention"] = "materialized"
    want = tiny.train_tiny(tiny.TinyRun(backend="cpu", **options))
    shown = Counting()
    with recorded():
        got = tiny.train_tiny(tiny.TinyRun(backend="tpu", **options), shown)
    assert got.metrics[-1].loss < 0.8 * got.metrics[0].loss
    for a, b in zip(got.metrics, want.metrics, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=5e-3)
        # Adam's first steps turn the rounding of small gradients into whole steps, at a rate of up to 0.02
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-4 if a.step == 1 else 5e-2)
    for a, b in ((got.before, want.before), (got.after, want.after)):
        assert a.loss == pytest.approx(b.loss, rel=2e-3) and a.tokens == b.tokens
        assert a.accuracy == pytest.approx(b.accuracy, abs=0.02)
    before, first, second, *others, last, after = shown.compiled
    assert not shown.fallbacks
    # torch_xla records the second step, whose parameters were written by a graph, in other words than the first
    assert first == before + 1 and second <= first + 1 and {*others, last} == {second}, shown.compiled
    assert after <= last + 1  # the first evaluation's graph may hold what had not been computed yet


def examples(count: int) -> list[Example]:
    """Of 3 to 30 tokens, some of them weighted."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for line in range(count):
        n = int(torch.randint(3, 31, (), generator=draw))
        ids = torch.randint(0, 256, (n,), generator=draw).tolist()
        made.append(Example(tuple(ids), tuple(0.0 if i < n // 3 else 1.0 + line % 2 for i in range(n)), line))
    return made


def trained(place, steps: int, count: Callable[[], int]):
    torch.manual_seed(0)
    model = Decoder(tiny.tiny_config(), attention="flash")
    for block in model.model.layers:
        block.mlp.up_proj = NF4Linear.from_linear(block.mlp.up_proj)
    apply_lora(model, LoraSpec(rank=4, alpha=8, dropout=0.0), seed=0)
    model = model.to(place)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, gradient_clip=1.0)
    loader = Loader(examples(40), 96, seed=0)
    seen, schedule = [], Schedule(1e-2, steps)
    sinks = [lambda metric: seen.append(count())]
    trainer = Trainer(model, optimizer, loader, schedule, accumulate=2, device=place, sinks=sinks)
    metrics = trainer.run().metrics
    return [m.loss for m in metrics], seen, trainer


@support.xla
def test_uneven_examples_are_one_graph(device):
    """Micro-batches of other lengths, numbers of documents, of labels and weights, two of them a step."""
    import torch_xla.debug.metrics as metrics

    def count():
        data = metrics.metric_data("CompileTime")
        return data[0] if data else 0

    want, _, _ = trained("cpu", 6, lambda: 0)
    held_out = Loader(examples(12), 96, seed=0).sequential()
    with recorded() as record:
        got, seen, trainer = trained(tpu.device(), 6, count)
        evaluate(trainer.model, held_out, tpu.device())
        before = count()
        there = evaluate(trainer.model, held_out, tpu.device())
        assert count() == before
    assert got[0] == pytest.approx(want[0], rel=1e-5) and got == pytest.approx(want, rel=5e-3)
    assert seen[1] <= seen[0] + 1 and set(seen[2:]) == {seen[1]}, seen
    assert not record.fallbacks
    state, tensors = trainer.state_dict()
    assert all(t.device.type == "cpu" for t in tensors.values()) and "random.tpu" in tensors
    trainer.load_state_dict(state, tensors)
    here = evaluate(trainer.model.to("cpu"), held_out)
    assert (there.loss, there.accuracy, there.tokens) == pytest.approx(
        (here.loss, here.accuracy, here.tokens), rel=1e-5
    )


def test_buckets_change_no_label_and_no_shape():
    loader = Loader(examples(40), 96, seed=0, epochs=1)
    buckets, shapes = Buckets.of(loader), set()
    while (batch := loader.next()) is not None:
        padded = buckets(batch)
        n = batch.physical_tokens
        assert torch.equal(padded.input_ids[:n], batch.input_ids) and torch.equal(padded.target[:n], batch.target)
        assert bool((padded.target[n:] < 0).all()) and bool((padded.row_weight[n:] == 0).all())
        assert padded.cu_seqlens[-1] == n and padded.spans == batch.spans
        shapes.add((padded.input_ids.shape, padded.cu_seqlens.shape, padded.row_weight.shape, padded.n_labelled))
    assert len(shapes) == 1
    assert Buckets()(pack(examples(30))).input_ids.numel() & (Buckets().tokens - 1) == 0


def test_buckets_keep_the_model_s_loss():
    torch.manual_seed(0)
    model = Decoder(tiny.tiny_config())
    batch = pack(examples(5))
    losses = []
    for b in (batch, Buckets(256, 9)(batch)):
        where = {"positions": b.positions, "cu_seqlens": b.cu_seqlens, "max_seqlen": b.max_seqlen}
        losses.append(model.loss(b.input_ids, b.target, b.row_weight, b.n_labelled, batch.n_labelled, **where))
    torch.testing.assert_close(*losses)


def test_what_xla_does_not_take_is_refused_by_name(monkeypatch):
    p = torch.nn.Parameter(torch.zeros(3, device="meta"))
    monkeypatch.setattr(tpu, "DEVICE_TYPE", "meta")
    with pytest.raises(ValueError, match="chunk=8 is not made for tpu"):
        Trainer(None, Adam([p]), None, Schedule(1.0, 1), device="meta", chunk=8)


def test_packed_weights_are_refused_with_the_remedy():
    config = FinetuneConfig(model="m.gguf", data="d.jsonl", output="o", weights="packed")
    with pytest.raises(ConfigError, match="--weights packed: GGUF's blocks have no kernel for tpu; use --weights nf4"):
        finetune._model(config, Ranks(tpu.DEVICE_TYPE), None)


def test_tied_weights_stay_tied_where_parameters_are_replaced():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model = Decoder(tiny.tiny_config()).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.float64
