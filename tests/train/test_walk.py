"""Chunks of a long row have the gradients of one graph over it."""

import pytest
import torch
import torch.nn.functional as F

from riftco.adapters import LoraSpec, apply_lora
from riftco.functional import Cache
from riftco.models import Decoder, DecoderConfig, KVCache
from riftco.models.load import quantize_blocks
from riftco.models.rotary import Rope
from riftco.train import read, walk, walk_runs
from riftco.train.chunked import _Run, adjoint_bytes, chunks_of, runs_of

V, LAYERS, K, D, CONTEXT, RUN, PREFIX, WINDOW = 48, 2, 2, 32, 512, 23, 19, 64


def decoder(method="full", dropout=0.0):
    torch.manual_seed(5)
    model = Decoder(DecoderConfig("llama", V, 64, 64, LAYERS, 4, K, D, CONTEXT, Rope(D, 1e4)))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6)  # attention that looks at something
    if method == "lora":
        apply_lora(model, LoraSpec(rank=4, dropout=dropout), seed=1)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_B" in n:
                    p.normal_(std=0.2)
    return model


def row(length, seed=0, unlabelled=()):
    generator = torch.Generator().manual_seed(seed)
    ids, target = torch.randint(V, (2, length), generator=generator).unbind()
    target[list(unlabelled)] = -100
    return ids, target


def filled(model, kind, slots=1, slot=0, page_size=None):
    cache = Cache.allocate(LAYERS, slots, WINDOW, K, D, dtype=kind, page_size=page_size, device=model.device)
    for layer in cache.layers:
        for t in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if t is not None:
                t.zero_()
    read(model, row(PREFIX, seed=9)[0].to(model.device), cache, slot=slot, chunk=8)
    return cache


class OneGraph:
    """The oracle: PyTorch's attention over the dequantised prefix and the run, in one graph."""

    def __init__(self, cache=None, slot=0, prefix=0):
        self.cache, self.slot, self.prefix = cache, slot, prefix

    def attend(self, layer, q, k, v, scale, window, softcap):
        assert window == (None, None) and not softcap
        if self.prefix:
            old = [t[self.slot, : self.prefix][None] for t in self.cache.dequantized(layer, q.dtype)]
            k, v = (torch.cat([a, b], 1) for a, b in zip(old, (k, v), strict=True))
        T, S = q.shape[1], k.shape[1]
        see = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // K, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=see, scale=scale).transpose(1, 2)


def oracle(model, ids, target, attends, prefix, weight=None, denominator=None):
    positions = torch.arange(prefix, prefix + len(ids))
    x, rotation = model.model.embed_tokens(ids[None]), model.rotary(positions)
    for layer in model.model.layers:
        x = layer(x, rotation, None, attends)
    losses = F.cross_entropy(model.lm_head(model.model.norm(x))[0], target, reduction="none", ignore_index=-100)
    losses = losses if weight is None else losses * weight
    return losses.sum() / (denominator or int((target >= 0).sum()))


def gradients(model):
    flat = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def compared(got, want):
    """(cosine, norm ratio) to four digits."""
    cosine = float(F.cosine_similarity(got, want, dim=0))
    return round(cosine, 4), round(float(got.norm() / want.norm()), 4)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
@pytest.mark.parametrize("kind", [None, "float32", "float16", "q8_0"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_walk_exact(method, kind, recompute):
    model = decoder(method)
    ids, target = row(RUN, unlabelled=(3, 4, 11))
    prefix = 0 if kind is None else PREFIX
    cache = None if kind is None else filled(model, kind)
    where = {} if kind is None else {"cache": cache, "prefix": prefix}
    want_loss = oracle(model, ids, target, OneGraph(cache, 0, prefix), prefix)
    want_loss.backward()
    want = gradients(model)
    assert want.norm() > 0.1
    for chunk in (RUN, 7, 4, 1) if recompute else (RUN, 6):
        done = walk(model, ids, target, chunk=chunk, recompute=recompute, **where)
        got = gradients(model)
        assert compared(got, want) == (1.0, 1.0), chunk
        assert float((got - want).norm() / want.norm()) < 2e-5
        assert float(done.loss) == pytest.approx(float(want_loss.detach()), rel=1e-5)
        assert (done.labelled, done.chunks) == (RUN - 3, -(-RUN // chunk))


def test_it_is_the_decoders_own_loss_and_accumulates():
    model = decoder()
    ids, target = row(RUN)
    weight = torch.rand(RUN)
    model.loss(ids[None], target[None], weight[None], denominator=50).backward()
    walk(model, ids, target, chunk=5, row_weight=weight, denominator=50)
    both = gradients(model)
    walk(model, ids, target, chunk=5, row_weight=weight, denominator=50)
    assert compared(both, 2 * gradients(model)) == (1.0, 1.0)


@pytest.mark.parametrize("recompute", [False, True])
def test_in_float64_chunks_are_exact_to_its_last_digits(recompute):
    model = decoder().double()
    ids, target = row(RUN)
    model.loss(ids[None], target[None]).backward()
    want = gradients(model)
    for chunk in (1, 6, RUN):
        walk(model, ids, target, chunk=chunk, recompute=recompute)
        assert float((gradients(model) - want).norm() / want.norm()) < 1e-13


def test_over_a_quantised_base():
    model = decoder()
    quantize_blocks(model)
    apply_lora(model, LoraSpec(rank=4), seed=1)
    ids, target = row(RUN)
    model.loss(ids[None], target[None]).backward()
    want = gradients(model)
    walk(model, ids, target, chunk=6, recompute=True)
    assert compared(gradients(model), want) == (1.0, 1.0)


@pytest.mark.parametrize("what", ["surrogate", "collect"])
def test_without_the_adjoints_of_later_chunks_it_is_another_gradient(monkeypatch, what):
    """The plain walk, one truncated graph a chunk, is what this test can tell apart."""
    model = decoder()
    ids, target = row(RUN)
    oracle(model, ids, target, OneGraph(), 0).backward()
    want = gradients(model)
    monkeypatch.setattr(_Run, what, (lambda self: ([], [])) if what == "surrogate" else (lambda self: None))
    walk(model, ids, target, chunk=4)
    assert compared(gradients(model), want)[0] < 0.999


def test_slots_and_pages_are_caches_too():
    model = decoder()
    ids, target = row(RUN)
    cache = filled(model, "float16", slots=3, slot=1, page_size=8)
    oracle(model, ids, target, OneGraph(cache, 1, PREFIX), PREFIX).backward()
    want = gradients(model)
    walk(model, ids, target, chunk=6, cache=cache, slot=1, prefix=PREFIX)
    assert compared(gradients(model), want) == (1.0, 1.0)


def tensors(cache):
    return [t for of in cache.layers for t in (of.k, of.v, of.k_scale, of.v_scale) if t is not None]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_walk_writes_nothing_into_the_cache(recompute):
    """Not even from a block that is run again: a write inside it would be made twice."""
    model = decoder()
    cache = filled(model, "q8_0", slots=2)
    before = [t.clone() for t in tensors(cache)]
    versions = [t._version for t in tensors(cache)]
    walk(model, *row(RUN), chunk=6, cache=cache, prefix=PREFIX, recompute=recompute)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(cache), strict=True))
    assert versions == [t._version for t in tensors(cache)]


@pytest.mark.parametrize("how", ["read on", "cut", "restored", "another slot"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_slot_that_is_written_before_the_backward_has_read_it(recompute, how, monkeypatch):
    """What a chunk's forward read, its backward and its blocks that run again read too, or the walk ends by name.
    Another slot is of no matter: neighbours are served meanwhile."""
    model, (ids, target), grads, real = decoder(), row(RUN), [], Decoder.head_loss
    for changes in (False, True):
        cache = KVCache(model.config, 2, WINDOW, layout="paged", page_size=8)
        with torch.no_grad():
            model(row(PREFIX, seed=9)[0], kv_cache=cache.begin([(0, PREFIX)]))
        saved = cache.snapshot(0)

        @torch.no_grad()
        def write(cache=cache, saved=saved):
            if how == "cut":
                cache.cut(0, PREFIX - 1)
            elif how == "restored":
                cache.restore(saved, 0)
            else:
                model(ids[:3], kv_cache=cache.begin([(int(how == "another slot"), 3)]))

        with monkeypatch.context() as patch:
            if changes:
                patch.setattr(Decoder, "head_loss", lambda *a, _write=write, **o: (real(*a, **o), _write())[0])
            if changes and how != "another slot":
                with pytest.raises(RuntimeError, match="walk: slot 0 was written while a chunk's backward"):
                    walk(model, ids, target, chunk=6, cache=cache, prefix=PREFIX, recompute=recompute)
                return
            walk(model, ids, target, chunk=6, cache=cache, prefix=PREFIX, recompute=recompute)
            grads.append(gradients(model))
    assert torch.equal(*grads)


def test_runs_of_a_row_and_the_cache_that_they_leave():
    model = decoder()
    ids, target = row(50, unlabelled=[*range(9), *range(17, 30), *range(40, 50)])
    cache, plain = (Cache.allocate(LAYERS, 2, WINDOW, K, D, dtype="float16") for _ in range(2))
    for t in [*tensors(cache), *tensors(plain)]:
        t.zero_()
    results = walk_runs(model, ids, target, cache, chunk=4, slot=1)
    got = gradients(model)
    assert [r.labelled for r in results] == [8, 10]
    for a, b in ((0, 9), (9, 17), (17, 30), (30, 40), (40, 50)):
        read(model, ids[a:b], plain, slot=1, start=a, chunk=4)
    assert all(torch.equal(a, b) for a, b in zip(tensors(cache), tensors(plain), strict=True))
    assert all(not t[0].any() for t in tensors(cache)), "the neighbour's rows are untouched"
    want_loss = 0.0
    for a, b in ((9, 17), (30, 40)):
        loss = oracle(model, ids[a:b], target[a:b], OneGraph(plain, 1, a), a, denominator=18)
        loss.backward()
        want_loss += float(loss.detach())
    assert compared(got, gradients(model)) == (1.0, 1.0)
    assert sum(float(r.loss) for r in results) == pytest.approx(want_loss, rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_falls_on_the_same_elements_both_times(monkeypatch, recompute):
    model = decoder("lora", dropout=0.3)
    ids, target = row(RUN)
    real, seen = _Run.collect, []

    def collect(self):
        for layer, (k, v) in self.own.items():
            if self.end < self.run:  # rows that were stored in the first pass
                assert torch.equal(k[0], self.keys[layer][self.start : self.end])
                assert torch.equal(v[0], self.values[layer][self.start : self.end])
                seen.append(layer)
        real(self)

    monkeypatch.setattr(_Run, "collect", collect)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        walk(model, ids, target, chunk=6, recompute=recompute)
        runs.append((gradients(model), torch.get_rng_state()))
    assert len(seen) == 2 * 3 * LAYERS
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    torch.manual_seed(3)
    assert not torch.equal(torch.get_rng_state(), runs[0][1]), "the generator moved on"


class Saved:
    """Most bytes that a graph holds at once."""

    def __init__(self):
        self.now = self.most = 0

    def __enter__(self):
        def pack(t):
            self.now += t.numel() * t.element_size()
            self.most = max(self.most, self.now)
            return _Held(self, t)

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc):
        self.hooks.__exit__(*exc)


class _Held:
    def __init__(self, owner, tensor):
        self.owner, self.tensor = owner, tensor

    def __del__(self):
        self.owner.now -= self.tensor.numel() * self.tensor.element_size()


def test_memory_is_a_chunks_graph_and_the_runs_rows():
    model = decoder()

    def held(length, chunk):
        with Saved() as saved:
            done = walk(model, *row(length), chunk=chunk)
        assert adjoint_bytes(model, length) == 2 * LAYERS * length * K * D * 8
        assert done.adjoint_bytes == (adjoint_bytes(model, length) if chunk < length else 0), "one chunk keeps no rows"
        return saved.most

    short, long, whole = held(64, 16), held(CONTEXT, 16), held(CONTEXT, CONTEXT)
    assert long < whole / 4  # 0.2: what grows with the run is the rows alone
    rows = LAYERS * 2 * (CONTEXT - 64) * K * D * 4  # the earlier rows that a chunk reads, once a layer
    assert long - short < 3 * rows


def test_the_rows_do_not_grow_with_what_lies_before(monkeypatch):
    model, made = decoder(), []
    real = _Run.__init__

    def init(self, *args, **options):
        real(self, *args, **options)
        made.append([t.shape[0] for t in (*self.keys, *self.d_keys)])

    monkeypatch.setattr(_Run, "__init__", init)
    done = walk(model, *row(RUN), chunk=8, cache=filled(model, "float16"), prefix=PREFIX)
    assert made == [[RUN] * 2 * LAYERS]
    assert done.adjoint_bytes == adjoint_bytes(model, RUN)
    _, target = row(RUN, unlabelled=range(10, RUN))  # nothing after the last label is computed
    assert walk(model, row(RUN)[0], target, chunk=5).adjoint_bytes == adjoint_bytes(model, 10)


def test_plan():
    assert chunks_of(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert chunks_of(3, 9) == [(0, 3)]
    assert list(runs_of(torch.tensor([-100, 4, 5, -1, -1, 0]))) == [(1, 3), (5, 6)]
    assert list(runs_of(torch.tensor([-1]))) == []
    assert list(runs_of(torch.tensor([1]))) == [(0, 1)]


def test_refusals_name_their_reason_and_change_nothing():
    model = decoder()
    ids, target = row(RUN)
    cache = filled(model, "float16")
    for why, call in {
        r"a run of 23 tokens \(the reply\) take \d+ bytes, more than the 1000 allowed": {"budget_bytes": 1000},
        "a chunk has 1 row or more": {"chunk": 0},
        "carries no label": {"target": torch.full((RUN,), -100)},
        "target must be one row": {"target": target[:5]},
        "row_weight must be one row": {"row_weight": torch.ones(3)},
        "needs a cache that holds it": {"prefix": 4},
        "a prefix of 99 rows needs": {"prefix": 99, "cache": cache},
        f"is longer than this model's {CONTEXT}": {
            "input_ids": torch.zeros(CONTEXT + 1, dtype=torch.int64),
            "target": torch.ones(CONTEXT + 1),
        },
    }.items():
        options = {"input_ids": ids, "target": target, "chunk": 4, **call}
        with pytest.raises(ValueError, match=why):
            walk(model, **options)
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="do not fit a window of 64"):
        read(model, ids, cache, start=50)
    walk(model, ids, target, chunk=4)
    assert gradients(model).norm() > 0
