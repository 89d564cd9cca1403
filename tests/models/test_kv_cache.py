"""The cache: logits of the whole in every family, dtype and layout; byte-exact snapshots; what is refused."""

import pytest
import torch
from families import FAMILIES
from support import close
from tiny_models import hf_model

from riftco.models import Decoder, DecoderConfig, KVCache, ModelError
from riftco.models.kv_rows import DTYPES, Rows

CACHES = [(dtype, layout) for dtype in DTYPES for layout in ("slot", "paged")]
# what rounding keys and values costs in logits, of their largest value
LOSS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2, "q8_0": 3e-2}


def decoder_of(family, **changes):
    reference = hf_model(family, **changes)
    decoder = Decoder(DecoderConfig.from_hf(reference.config.to_dict())).eval()
    decoder.load_state_dict(reference.state_dict())
    return decoder


def poisoned(cache):
    """Rows that nobody wrote must not show."""
    for group in cache.groups:
        for t in group._tensors():
            t.fill_(float("nan") if t.is_floating_point() else 77)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("layout", ["slot", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_gives_the_logits_of_the_whole(family, layout):
    decoder = decoder_of(family)
    ids = torch.randint(0, 160, (2, 60))
    cache = poisoned(KVCache(decoder.config, 2, 60, layout=layout, page_size=7))
    got = [decoder(part, kv_cache=cache) for part in ids.split([11, 1, 1, 30, 12, 5], 1)]
    close(torch.cat(got, 1), decoder(ids), 1e-5)
    assert cache.length == 60


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "layout"), CACHES)
@pytest.mark.parametrize("family", ["llama-3.1", "gemma3"])
def test_every_dtype(family, dtype, layout):
    decoder = decoder_of(family)
    ids = torch.randint(0, 160, (1, 30))
    cache = poisoned(KVCache(decoder.config, 1, 30, dtype=dtype, layout=layout, page_size=7))
    got = [decoder(part, kv_cache=cache) for part in ids.split([20, 1, 9], 1)]
    close(torch.cat(got, 1), decoder(ids), LOSS[dtype])
    assert (cache.dtype, cache.layout) == (dtype, layout)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["slot", "paged"])
def test_runs_of_different_lengths_in_one_step(layout):
    """A prefill, a decode row and a continued run, of slots in any order, as each would read alone."""
    decoder = decoder_of("gemma2")
    texts = [torch.randint(0, 160, (n,)) for n in (9, 17, 30)]
    cache = poisoned(KVCache(decoder.config, 4, 32, layout=layout, page_size=5))
    got = {slot: [] for slot in (3, 0, 2)}
    taken = dict.fromkeys(got, 0)
    for counts in ({3: 9, 0: 16, 2: 4}, {2: 20}, {2: 5, 0: 1}, {2: 1}):
        step = cache.begin(list(counts.items()))
        parts = [texts[list(got).index(s)][taken[s] : taken[s] + n] for s, n in counts.items()]
        logits = decoder(torch.cat(parts), kv_cache=step)
        for slot, piece in zip(counts, logits.split(list(counts.values()))):
            got[slot].append(piece)
            taken[slot] += len(piece)
    for text, pieces in zip(texts, got.values()):
        close(torch.cat(pieces), decoder(text[None])[0], 1e-5)
    assert cache.lengths == [17, 0, 30, 9]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "layout"), CACHES)
@pytest.mark.parametrize("family", ["llama-3.1", "gemma3"])
def test_snapshot_and_restore_are_the_same_bytes(family, dtype, layout):
    """Of a range, into the same slot and into another, after other rows were written over it; what follows is equal."""
    decoder = decoder_of(family)
    ids = torch.randint(0, 160, (2, 32))

    def fresh():
        return poisoned(KVCache(decoder.config, 3, 40, dtype=dtype, layout=layout, page_size=7, undo=12))

    cache = fresh()
    decoder(ids[:1, :24], kv_cache=cache)
    saved, part = cache.snapshot(0), cache.snapshot(0, 18, 24)
    assert 0 < part.nbytes < saved.nbytes
    want = decoder(ids[:1, 24:28], kv_cache=cache)
    cache.cut(0, 18)
    decoder(ids[1:, :10], kv_cache=cache)  # other rows in the range
    cache.cut(0, 18)
    cache.restore(part, 0)
    again = cache.snapshot(0)
    for (_, before), (_, after) in zip(saved.rows, again.rows):
        for a, b in zip(before, after):  # a ring has lost its oldest rows meanwhile
            assert len(b) and torch.equal(a[-len(b) :].view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(decoder(ids[:1, 24:28], kv_cache=cache), want)
    other = fresh()
    other.restore(saved, 2)
    assert other.lengths == [0, 0, 24]
    assert torch.equal(decoder(ids[0, 24:28], kv_cache=other.begin([(2, 4)])), want[0])


@torch.no_grad()
@pytest.mark.parametrize("layout", ["slot", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_taken_back_and_read_again_change_nothing(family, layout):
    """A prefill, four decodes, two of them undone and redone: logits and every byte; and room to undo changes none."""
    decoder = decoder_of(family)
    ids = torch.randint(0, 160, (1, 44))
    ended = []
    for undo in (0, 4):
        cache = poisoned(KVCache(decoder.config, 2, 64, layout=layout, page_size=7, undo=undo))
        logits = [decoder(part, kv_cache=cache) for part in ids.split([40, 1, 1, 1, 1], 1)]
        ended.append((torch.cat(logits, 1), cache.snapshot(0)))
    for a, b in zip(*(logits for logits, _ in ended)):
        assert torch.equal(a, b)
    cache.cut(0, 42)
    again = torch.cat([decoder(ids[:, i : i + 1], kv_cache=cache) for i in (42, 43)], 1)
    assert torch.equal(again, ended[1][0][:, 42:])
    for (first, want), (second, got) in zip(ended[1][1].rows, cache.snapshot(0).rows):
        assert first == second
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(want, got))


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "layout"), CACHES)
def test_prompts_and_decodes_by_turns_reserve_nothing_more(dtype, layout):
    """All of a cache is there from the start, in every dtype, with no 16-bit rows beside it: reads of any length leave
    every tensor where it lies."""
    decoder = decoder_of("llama-3.1")
    window, before = 128, None
    cache = KVCache(decoder.config, 2, window, dtype=dtype, layout=layout, page_size=16)
    for count in (40, 1, 1, 30, 1):
        decoder(torch.randint(0, 160, (count,)), kv_cache=cache.begin([(1, count)]))
        held = [(t.data_ptr(), t.numel()) for group in cache.groups for t in group._tensors()]
        assert before in (None, held)
        before = held
    values = 2 * decoder.config.num_layers * 2 * window * decoder.config.num_kv_heads * decoder.config.head_dim
    assert cache.nbytes == values * {"float32": 4, "float16": 2, "bfloat16": 2, "q8_0": 34 / 32}[dtype]


@torch.no_grad()
def test_physical_rows_are_made_once_a_step(monkeypatch):
    decoder = decoder_of("gemma3", num_hidden_layers=2)
    cache = KVCache(decoder.config, 1, 40)
    made, rows = [], Rows.rows
    monkeypatch.setattr(Rows, "rows", lambda self, *a: (made.append(self), rows(self, *a))[1])
    step = cache.begin([(0, 12)])
    decoder(torch.randint(0, 160, (12,)), kv_cache=step)
    assert made == cache.groups  # one for the window's ring, one for the layer that sees all
    kept = [r.tolist() for r in step.rows.values()]
    assert [*range(12)] in kept and [-1] * 5 + [5, 6, 0, 1, 2, 3, 4] in kept


@torch.no_grad()
@pytest.mark.parametrize("layout", ["slot", "paged"])
def test_a_quantised_row_that_is_read_and_written_again_is_the_same_bytes(layout):
    decoder = decoder_of("llama-3.1")
    cache = KVCache(decoder.config, 1, 20, dtype="q8_0", layout=layout, page_size=7)
    decoder(torch.randint(0, 160, (1, 20)), kv_cache=cache)
    saved = cache.snapshot(0)
    for layer in range(2):
        of, place = cache.layer(layer)
        k, v = (t[0, :20] for t in of.dequantized(place))
        rows = of.rows(torch.tensor([0]), torch.tensor([0]), 20)
        of.write(place, rows, torch.zeros_like(k), torch.zeros_like(v))
        of.write(place, rows, k, v)
    for a, b in zip(saved.rows[0][1], cache.snapshot(0).rows[0][1]):
        assert torch.equal(a, b)


@torch.no_grad()
def test_layers_with_a_window_keep_only_what_it_needs():
    decoder = decoder_of("gemma3", num_hidden_layers=2)
    small = KVCache(decoder.config, 2, 128)
    whole = KVCache(decoder.config, 2, 128, undo=None)
    row = 2 * decoder.config.num_kv_heads * decoder.config.head_dim * 4
    assert whole.nbytes == 2 * 2 * 128 * row and small.nbytes == 2 * (128 + 7) * row
    ids = torch.randint(0, 160, (1, 60))
    for cache in (small, whole):
        decoder(ids[:, :50], kv_cache=cache)
    with pytest.raises(ModelError, match=r"slot 0 cannot end at 40: layers .* need positions from 33 .* from 43"):
        small.cut(0, 40)
    assert small.lengths[0] == 50
    whole.cut(0, 40)
    close(decoder(ids[:, 40:], kv_cache=whole), decoder(ids)[:, 40:], 1e-5)
    roomy = KVCache(decoder.config, 1, 128, undo=10)
    decoder(ids[:, :50], kv_cache=roomy)
    roomy.cut(0, 40)
    close(decoder(ids[:, 40:], kv_cache=roomy), decoder(ids)[:, 40:], 1e-5)


@torch.no_grad()
def test_a_snapshot_that_lacks_rows_of_the_window_is_refused():
    decoder = decoder_of("mistral-window")
    ids = torch.randint(0, 160, (1, 40))
    cache, other = KVCache(decoder.config, 1, 64), KVCache(decoder.config, 1, 64)
    for part in ids.split([38, 2], 1):  # read as the other one is: rows of other shapes round otherwise
        decoder(part, kv_cache=cache)
    late = cache.snapshot(0, 38)  # two rows; what the window needs before them must be in the slot
    decoder(ids[:, :38], kv_cache=other)
    other.restore(late, 0)
    want = decoder(ids[:, :5], kv_cache=cache)
    # 40 rows and 38 are products of two shapes, whose last bits the matmul may choose by how its operands lie
    torch.testing.assert_close(decoder(ids[:, :5], kv_cache=other), want, rtol=1e-5, atol=1e-5)
    short = KVCache(decoder.config, 1, 64)
    decoder(ids[:, :10], kv_cache=short)
    with pytest.raises(ModelError, match="positions 38 to 40 does not fit slot 0, which ends at 10"):
        short.restore(late, 0)
    with pytest.raises(ModelError, match="of another dtype"):
        KVCache(decoder.config, 1, 64, dtype="float16").restore(cache.snapshot(0), 0)
    with pytest.raises(ModelError, match="with other layers"):
        KVCache(decoder_of("gemma3").config, 1, 64).restore(cache.snapshot(0), 0)


@torch.no_grad()
def test_pages_are_given_out_and_come_back():
    decoder = decoder_of("llama")
    cache = poisoned(KVCache(decoder.config, 4, 64, layout="paged", page_size=8, pages=6))
    ids = torch.randint(0, 160, (60,))
    decoder(ids[:20], kv_cache=cache.begin([(0, 20)]))
    decoder(ids[:9], kv_cache=cache.begin([(3, 9)]))
    with pytest.raises(ModelError, match="2 pages of 8 rows are needed, 1 are free"):
        cache.begin([(0, 5), (3, 8)])
    assert cache.lengths == [20, 0, 0, 9] and len(cache.groups[0].free) == 1
    cache.clear(0)
    assert len(cache.groups[0].free) == 4
    got = decoder(ids[9:40], kv_cache=cache.begin([(3, 31)]))  # pages that another slot had before
    close(got, decoder(ids[None, :40])[0, 9:], 1e-5)
    cache.cut(3, 16)
    assert len(cache.groups[0].free) == 4


class Recurrent:
    """A layer that keeps one state: what it has read, whole."""

    def __init__(self):
        self.read = {}

    def ends_at(self, slot):
        return self.read.get(slot, 0)

    def snapshot(self, slot):
        return self.ends_at(slot)

    def restore(self, slot, saved):
        self.read[slot] = saved

    def clear(self, slot):
        self.read.pop(slot, None)


@torch.no_grad()
def test_a_layer_may_keep_something_else_than_keys_and_values():
    """Its state cannot be cut back: a snapshot that ends there must be restored."""
    config = decoder_of("llama").config
    state = Recurrent()
    cache = KVCache(config, 2, 32, states={0: state})
    assert len(cache.groups) == 1 and len(cache.groups[0].cache.layers) == config.num_layers - 1
    cache.begin([(1, 6)]).finish()
    state.read[1] = 6
    saved = cache.snapshot(1)
    cache.begin([(1, 3)]).finish()
    state.read[1] = 9
    with pytest.raises(ModelError, match="the state of layer 0 has read 9 positions and cannot be cut back to 6"):
        cache.cut(1, 6)
    with pytest.raises(ModelError, match="a snapshot of it cannot end at 6"):
        cache.snapshot(1, 0, 6)
    assert cache.lengths == [0, 9]
    cache.restore(saved, 1)
    assert cache.lengths == [0, 6] and state.read == {1: 6}
    cache.cut(1, 6)
    cache.clear(1)
    assert cache.lengths == [0, 0] and state.read == {}


def test_what_does_not_fit_is_refused_before_anything_changes():
    decoder = decoder_of("llama")
    cache = KVCache(decoder.config, 2, 8)
    ids = torch.randint(0, 160, (1, 9))
    with torch.no_grad():
        with pytest.raises(ModelError, match="9 more positions after 0 do not fit its window of 8"):
            decoder(ids, kv_cache=cache)
        with pytest.raises(ModelError, match=r"different slots below 2; got slots \[0, 1, 2\]"):
            decoder(ids[:, :3].expand(3, 3), kv_cache=cache)
        with pytest.raises(ModelError, match="different slots below 2; got slots \\[1, 1\\]"):
            cache.begin([(1, 2), (1, 2)])
        with pytest.raises(ModelError, match=r"one or more different slots below 2; got slots \[\]"):
            cache.begin([])
        with pytest.raises(ModelError, match="cu_seqlens"):
            decoder(ids[0], cu_seqlens=torch.tensor([0, 9]), kv_cache=cache)
        with pytest.raises(ModelError, match="this step of the cache is of 4 tokens; got 9"):
            decoder(ids[0], kv_cache=cache.begin([(1, 4)]))
    with pytest.raises(ModelError, match="no_grad"):
        decoder(ids[:, :3], kv_cache=cache)
    assert cache.lengths == [0, 0]
    with pytest.raises(ModelError, match="cannot cut 0 positions to 1"):
        cache.truncate(1)
    with pytest.raises(ModelError, match="positions 0 to 1 are not among the 0 of slot 0"):
        cache.snapshot(0, 0, 1)
    with torch.no_grad():
        decoder(ids[0, :4], kv_cache=cache.begin([(1, 4)]))
    with pytest.raises(ModelError, match=r"different lengths, \[0, 4\]"):
        assert cache.length


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 0}, "window must be between 1 and the model's context, 128; got 0"),
        ({"window": 129}, "window must be between 1 and the model's context, 128; got 129"),
        ({"slots": 0}, "sizes must be at least 1"),
        ({"undo": -1}, "sizes must be at least 1"),
        ({"layout": "ring"}, "layout must be one of slot, paged; got 'ring'"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, q8_0; got 'int8'"),
        ({"dtype": torch.float64}, "dtype must be one of"),
        ({"dtype": None}, "dtype must be one of"),
        ({"dtype": "q8_0"}, "q8_0 has blocks of 32 along the head dim; got head dim 16"),
    ],
)
def test_options_that_are_refused(options, says):
    config = DecoderConfig.from_hf(hf_model("llama").config.to_dict())
    with pytest.raises(ModelError, match=says):
        KVCache(config, **options)


@pytest.mark.parametrize("options", [{}, {"layout": "paged", "page_size": 4}, {"layout": "paged", "page_size": 5}])
def test_rows_of_tokens_are_rows_of_runs_of_one(options):
    cache = KVCache(decoder_of("llama").config, 3, 12, **options)
    with torch.no_grad():
        cache.reserve([(0, 5), (2, 12)])
    (group,) = cache.groups
    slots, at = torch.tensor([2, -1, 0, 2]), torch.tensor([11, 0, 4, 3])
    got, want = group.cache.rows_of_tokens(slots, at), group.cache.rows(slots, at, 4)
    assert torch.equal(got.where(got >= 0, -1), want) and int(got[1]) < 0
