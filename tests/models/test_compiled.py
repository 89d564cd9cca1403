"""The compiled decoding gives what the decoder's modules give, for every family, weight, cache and batch."""

import pytest
import torch
from families import FAMILIES
from tiny_models import hf_config

from riftco import cpu
from riftco.functional import GGUFWeight
from riftco.kernels.gguf_linear.formats import FORMATS
from riftco.models import Decoder, DecoderConfig, ModelError, generate_tokens
from riftco.models.compiled import MOST_ROWS, CompiledDecoder, Unfit, _say
from riftco.models.kv_cache import KVCache
from riftco.nn import GGUFEmbedding, GGUFLinear, LoRALinear, NF4Linear

pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason=cpu.why_not())
PROMPTS = [list(range(3, 40)), [7, 9, 11], [5] * 70 + [8, 2]]  # none, one and two whole chunks of cached positions
FIRST = torch.zeros(1, dtype=torch.int64)
RUNS = [[(0, 1)], [(1, 1), (0, 1)], [(0, 3), (2, 1), (1, 2)], [(2, 2), (0, 9)], [(1, MOST_ROWS)]]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def decoder(family="llama", dtype=torch.float32, **changes) -> Decoder:
    made = Decoder(DecoderConfig.from_hf(hf_config(family, **changes).to_dict())).eval().requires_grad_(False)
    for name, p in made.named_parameters():
        if p.dim() == 2:
            p.normal_(std=0.15)
        else:
            p.add_(torch.randn_like(p) * 0.2) if "norm" in name else p.normal_(std=0.3)
    return made.to(dtype)


def filled(model: Decoder, **options) -> KVCache:
    cache = KVCache(model.config, 3, 120, **{"dtype": "float32", "undo": 16, **options})
    with torch.no_grad():
        for slot, prompt in enumerate(PROMPTS):
            for start in range(0, len(prompt), 16):
                part = prompt[start : start + 16]
                model.hidden(torch.tensor(part), kv_cache=cache.begin([(slot, len(part))]))
    return cache


def rows(cache: KVCache, slot: int) -> list[torch.Tensor]:
    """What the slot holds, as numbers."""
    saved = cache.snapshot(slot).rows
    return [t.float() for _, tensors in saved for t in tensors]


def both(model: Decoder, runs=RUNS, **options):
    """(logits, cache) of the same batches, decoded by the modules and compiled."""
    results = []
    for compiled in (False, True):
        cache = filled(model, **options)
        step_of = CompiledDecoder(model, cache) if compiled else None
        made = []
        for i, run in enumerate(runs):
            step = cache.begin(run)
            tokens = torch.randint(model.config.vocab_size, (step.total,), generator=torch.Generator().manual_seed(i))
            wanted = torch.arange(0, step.total, 2)
            if step_of is None:
                with torch.no_grad():
                    made.append(model.logits(model.hidden(tokens, kv_cache=step)[wanted]))
            else:
                made.append(step_of.logits(tokens, step, wanted))
        results.append((torch.cat(made), cache))
    return results


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean squared error over mean square."""
    return float((got.double() - want.double()).square().sum() / want.double().square().sum().clamp_min(1e-30))


def agree(model: Decoder, runs=RUNS, most: float = 1e-11, **options) -> None:
    (want, old), (got, new) = both(model, runs, **options)
    assert got.dtype == want.dtype and got.shape == want.shape and bool(got.isfinite().all())
    assert apart(got, want) < most
    assert old.lengths == new.lengths
    for slot in range(3):
        for mine, theirs in zip(rows(new, slot), rows(old, slot)):
            assert apart(mine, theirs) < most


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    agree(decoder(family))


@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("family", ["llama-3.1", "gemma3"])
def test_every_cache(family, cache, page_size):
    layout = {} if page_size is None else {"layout": "paged", "page_size": page_size}
    # a rounding on the edge falls to the other side here and there
    agree(decoder(family), dtype=cache, most={"float32": 1e-11}.get(cache, 1e-5), **layout)


@pytest.mark.parametrize("family", ["llama", "llama-biases", "gemma2", "qwen3", "phi3"])
def test_bfloat16(family):
    """Both lose what bfloat16 loses against float32, and about as much."""
    model = decoder(family, torch.bfloat16)
    (plain, _), (got, _) = both(model, dtype="bfloat16")
    (exact, _), _ = both(model.float(), dtype="float32")
    assert got.dtype == torch.bfloat16 and apart(got, exact) < 2 * apart(plain, exact)


def packed(model: Decoder, format: str, dtype=torch.float32) -> Decoder:
    """The decoder with random blocks in every linear layer and in the embedding, which the head shares."""
    f = FORMATS[format]

    def weight(N: int, K: int) -> GGUFWeight:
        blocks = torch.randint(256, (N * K // f.block, f.bytes), dtype=torch.uint8)
        for at in f.halves:
            size = torch.rand(len(blocks), 1) * (2e-3 if "K" in format else 2e-2)
            blocks[:, at : at + 2] = (size * torch.randn(len(blocks), 1).sign()).half().view(torch.uint8)
        return GGUFWeight(blocks.view(N, -1), format, (N, K))

    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            made = GGUFLinear.from_weight(weight(*module.weight.shape), module.bias)
            model.set_submodule(name, made)
    shared = weight(model.config.vocab_size, model.config.hidden_size)
    model.model.embed_tokens, model.lm_head = GGUFEmbedding(shared, dtype), GGUFLinear.from_weight(shared)
    return model.to(dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_every_packed_format(format):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "attention_bias": True}
    agree(packed(decoder("llama", **sizes), format), RUNS[:4], most=1e-10)


@pytest.mark.parametrize("format", ["Q4_1", "Q6_K"])
def test_packed_under_bfloat16(format):
    model = packed(decoder("llama", hidden_size=256, intermediate_size=512), format, torch.bfloat16)
    (plain, _), (got, _) = both(model, RUNS[:4], dtype="bfloat16")
    (exact, _), _ = both(model.float(), RUNS[:4])
    assert apart(got, exact) < 2 * apart(plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-biases", "phi3"])
def test_adapters(family, dtype):
    """Of different ranks, over layers that are apart, fused, packed, and over the head."""
    model = decoder(family)
    for i, (name, module) in enumerate(list(model.named_modules())):
        if isinstance(module, torch.nn.Linear) and "layers.0.self_attn.v" not in name:
            layer = LoRALinear(module, 3 + i % 40, 16.0, dtype=dtype).eval()
            torch.nn.init.normal_(layer.lora_B.weight, std=0.2)
            model.set_submodule(name, layer)
    agree(model, most=1e-11 if dtype == torch.float32 else 1e-4)


def test_a_row_does_not_depend_on_its_neighbours_or_threads():
    model, threads = decoder("gemma3"), torch.get_num_threads()
    alone = []
    for slot in range(3):
        cache = filled(model)
        alone.append(CompiledDecoder(model, cache).logits(torch.tensor([4]), cache.begin([(slot, 1)]), FIRST))
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(threads)
            cache = filled(model)
            torch.set_num_threads(n)
            step = cache.begin([(slot, 1) for slot in range(3)])
            together = CompiledDecoder(model, cache).logits(torch.tensor([4, 4, 4]), step, torch.arange(3))
            assert torch.equal(together, torch.cat(alone))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "q8_0"])
def test_rows_are_stored_as_the_cache_stores_them(kind):
    """Layer 0 reads no cache, so its keys and values are those of the float32 cache, in another form."""
    model, stored = decoder("llama-3.1", num_hidden_layers=1), []
    for dtype in ("float32", kind):
        cache = KVCache(model.config, 1, 64, dtype=dtype)
        CompiledDecoder(model, cache).logits(torch.arange(20), cache.begin([(0, 20)]), FIRST)
        stored.append(cache)
    exact, got = (cache.layer(0)[0] for cache in stored)
    want = KVCache(model.config, 1, 64, dtype=kind).layer(0)[0]
    want.write(0, torch.arange(20), exact.layers[0].k[0, :20], exact.layers[0].v[0, :20])
    for name in ("k", "v", "k_scale", "v_scale"):
        mine, theirs = getattr(got.layers[0], name), getattr(want.layers[0], name)
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine[0, :20], theirs[0, :20])


def test_the_scratch_keeps_nothing():
    """A NaN of one step reaches no other one."""
    model = decoder("llama-biases", hidden_size=72, intermediate_size=100, head_dim=24)
    want, cache = None, filled(model)
    made = CompiledDecoder(model, cache)
    for token in (4, 5, 4):
        spoilt = token == 5
        if spoilt:
            kept = model.model.embed_tokens.weight[5].clone()
            model.model.embed_tokens.weight[5] = torch.nan
        got = made.logits(torch.full((9,), token), cache.begin([(0, 9)]), torch.arange(9))
        cache.cut(0, len(PROMPTS[0]))
        if spoilt:
            assert bool(got.isnan().all())
            model.model.embed_tokens.weight[5] = kept
        elif want is None:
            want = got
        else:
            assert torch.equal(got, want)


def test_generation_says_what_the_modules_say(monkeypatch):
    model = decoder("smollm2")
    got = list(generate_tokens(model, PROMPTS[0], max_new_tokens=24))
    monkeypatch.setattr("riftco.models.generation.compiled_decoder", lambda *_: None)
    assert got == list(generate_tokens(model, PROMPTS[0], max_new_tokens=24))


def test_generation_in_python_is_said_once(caplog):
    model = decoder(dtype=torch.float16)
    _say.cache_clear()
    for _ in range(2):
        assert len(list(generate_tokens(model, [3, 4], max_new_tokens=3))) == 3
    assert [r.message.partition(";")[0] for r in caplog.records] == [
        "decoding stays in Python: activations are torch.float16"
    ]


def unfit(model: Decoder, **options) -> str:
    with pytest.raises(Unfit) as refused:
        CompiledDecoder(model, KVCache(model.config, 1, 16, **options))
    return str(refused.value)


def test_what_it_is_not_made_for_is_named():
    assert "activations are torch.float16" in unfit(decoder(dtype=torch.float16))
    model = decoder()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "model.layers.1.mlp has a hook" in unfit(model)
    model = decoder()
    model.model.layers[0].self_attn.o_proj = NF4Linear.from_linear(model.model.layers[0].self_attn.o_proj)
    assert "model.layers.0.self_attn.o_proj is a NF4Linear" in unfit(model)
    model = decoder()
    model.lm_head = LoRALinear(model.lm_head, 4, 8.0, use_dora=True)
    assert "lm_head has a DoRA" in unfit(model)
    model = decoder()
    model.lm_head = LoRALinear(model.lm_head, 4, 8.0, 0.5).train()
    assert "lm_head drops out" in unfit(model)
    model = decoder()
    model.lm_head = torch.nn.Linear(64, 160, bias=False, dtype=torch.bfloat16)
    assert "lm_head is in torch.bfloat16 under activations in torch.float32" in unfit(model)
    model = decoder()
    model.model.norm = torch.nn.LayerNorm(64)
    assert "model.norm is not the decoder's own" in unfit(model)


def test_steps_of_others_are_refused():
    model = decoder()
    cache, other = filled(model), filled(model)
    made = CompiledDecoder(model, cache)
    for tokens, step in ((1, other.begin([(0, 1)])), (2, cache.begin([(0, 1)])), (33, cache.begin([(0, 33)]))):
        with pytest.raises(ModelError, match="a step of this cache"):
            made.logits(torch.zeros(tokens).long(), step, FIRST)
    assert cache.lengths == [len(p) for p in PROMPTS]


def test_logits_of_any_rows_in_any_order():
    """Those that are not there are refused before anything is read or written."""
    model, tokens = decoder(), torch.arange(5, 17)
    cache = filled(model)
    made = CompiledDecoder(model, cache)
    every = made.logits(tokens, cache.begin([(1, 12)]), torch.arange(12))
    for wanted in ([11, 0, 4], [3, 3, 1], list(range(11, -1, -1)), [5] * 40, []):
        cache.cut(1, len(PROMPTS[1]))
        assert torch.equal(made.logits(tokens, cache.begin([(1, 12)]), torch.tensor(wanted).long()), every[wanted])
    before = rows(cache, 1)
    for wanted in ([-1], [12], [0, 1 << 40], [-(1 << 62), 3]):
        with pytest.raises(ModelError, match="rows 0 to 11 can be asked for"):
            made.logits(tokens, cache.begin([(1, 12)]), torch.tensor(wanted))
    for token in (-1, model.config.vocab_size, 1 << 40):
        with pytest.raises(IndexError):
            made.logits(torch.full((12,), token), cache.begin([(1, 12)]), FIRST)
    assert cache.lengths[1] == len(PROMPTS[1]) + 12
    assert all(torch.equal(now, then) for now, then in zip(rows(cache, 1), before))


def test_a_step_of_what_the_cache_held_before_is_refused():
    """Its rows may be another's by now, and the room for parts of attention is that of what is held."""
    model = decoder()
    cache = filled(model)
    made = CompiledDecoder(model, cache)
    step = cache.begin([(0, 1), (2, 1)])
    made.logits(torch.tensor([1, 2]), step, FIRST)
    held = list(cache.lengths)
    with pytest.raises(ModelError, match="has changed since this step began"):
        made.logits(torch.tensor([1, 2]), step, FIRST)
    step = cache.begin([(2, 1)])
    cache.cut(2, 0)
    with pytest.raises(ModelError, match="has changed since this step began"):
        made.logits(torch.tensor([1]), step, FIRST)
    assert cache.lengths == [held[0], held[1], 0]
