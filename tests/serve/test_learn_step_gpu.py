"""Recorded learns on a GPU: real CUDA graphs beside what is computed as it comes, and beside the walk."""

import pytest
import torch
from objective import SPEC, add, decoder, prefill, tokens
from test_decode_step import LAYOUTS, one_token
from test_learn_step import PROMPTS, counts, learn, same

from riftco.adapters import LoraSpec
from riftco.models.load import quantize_blocks
from riftco.serve import Engine


def gpu(graphs, nf4=False, dtype="float16", spec=SPEC, **options):
    torch.manual_seed(1)
    model = decoder().to("cuda", torch.bfloat16)
    if nf4:
        quantize_blocks(model)
    made = Engine(
        model, slots=3, window=48, cache_dtype=dtype, **{"chunk": 32, "learn_chunk": 32, **options}, learn_graphs=graphs
    )  # fmt: skip
    add(made, "a", spec)
    for slot, prompt in enumerate(PROMPTS):
        prefill(made, slot, prompt)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(  # each pair of the three once: a case compiles for half a minute
    "layout,nf4,dtype,recompute",
    [
        ("slots", False, "float16", True),
        ("slots", False, "q8_0", False),
        ("pages", True, "float16", False),
        ("pages", True, "q8_0", True),
    ],
)
def test_on_a_gpu(layout, nf4, dtype, recompute):
    """Learns of any slot, length and prefix between decode steps; undone, promoted, of an adapter made again."""
    options = {"nf4": nf4, "dtype": dtype, "recompute": recompute, **LAYOUTS[layout]}
    made, eager, walked = gpu(True, **options), gpu(False, **options), gpu(False, **options)
    walked.learner.step = None
    for i, (slot, n) in enumerate([(0, 9), (1, 12), (2, 3), (1, 20), (0, 16), (2, 17), (0, 1), (1, 23)]):
        got, want, plain = (learn(e, slot, n, i) for e in (made, eager, walked))
        assert (got.loss_before, got.gradient_norm) == (want.loss_before, want.gradient_norm)
        assert got.loss_before == pytest.approx(plain.loss_before, rel=0.05)
        same(made, eager)
        logits = [one_token(e, [0, 1, 2], i).logits for e in (made, eager)]
        assert torch.equal(*logits)
        for e in (made, eager):
            for s, prompt in enumerate(PROMPTS):
                e.cut(s, len(prompt))
    assert counts(made) == (2, 6, 2), made.learner.step.off
    for e in (made, eager):
        assert e.undo("a", 2) == 6
        learn(e, 1, 10)
        assert e.promote("a") == 2
        e.use(1, {"a": 1.0})
        prefill(e, 1, PROMPTS[1])
        learn(e, 1, 11)
    same(made, eager)
    assert counts(made)[0] == 2
    for e in (made, eager):
        e.use(1, {})
        e.remove("a")
        add(e, "a", SPEC, seed=8)
        prefill(e, 1, PROMPTS[1])
        for i in range(3):
            learn(e, 1, 5, i)
    same(made, eager)
    texts = [[(tokens(n, i), tokens(n, i + 9), None) for n in (20, 6, 40, 5)] for i in range(3)]
    for given in texts:
        losses = [e.study(given, adapter="a", lr=1e-3).loss_before for e in (made, eager)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert not made.learner.step.off and counts(made)[0] == 5


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_on_a_gpu(recompute):
    spec = LoraSpec(rank=4, alpha=8, dropout=0.5)
    made, eager = (gpu(graphs, spec=spec, recompute=recompute) for graphs in (True, False))
    losses = []
    for e in (made, eager):
        torch.cuda.manual_seed(3)
        learn(e, 1, 5)
        losses.append([learn(e, 1, 5, lr=1e-7).loss_before for _ in range(4)])
        before = torch.cuda.get_rng_state()
        learn(e, 1, 5, dry_run=True)
        assert torch.equal(torch.cuda.get_rng_state(), before)
    assert losses[0] == losses[1] and len(set(losses[0])) == 4
    assert counts(made) == (1, 5, 1), made.learner.step.off


@pytest.mark.gpu
def test_graphs_share_their_memory_and_give_it_back():
    made = gpu(True)
    for n in (5, 5, 20, 20, 30, 30):
        learn(made, 1, n)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held, step = torch.cuda.memory_reserved(), made.learner.step
    sizes = [graph.captured.pool_bytes for graph in step._graphs.values()]
    assert step.pool_bytes == sum(sizes) > 0 <= min(sizes) and sizes[0] == max(sizes), "the others fit the first's"
    step.forget()
    assert not step.pool_bytes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
    learn(made, 1, 5)
    learn(made, 1, 5)
    assert counts(made)[0] == 4
