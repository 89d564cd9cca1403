"""Rows drawn together: each as it would be drawn alone, whatever the others ask for."""

import pytest
import torch

from riftco.serve import Sampling
from riftco.serve.draw import choose, draw
from riftco.serve.sampling import Sampler

V = 300
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {3: 5.0, 7: -torch.inf}, "frequency_penalty": 2.0},
    {"temperature": 1.0, "logit_bias": {3: 50.0}},
    {"temperature": 1e-9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": V + 5, "top_p": 1e-9},
]


def samplers(seed=0):
    return [Sampler(Sampling(seed=seed + i, **o), [1, 2], V, torch.device("cpu")) for i, o in enumerate(OPTIONS)]


def logits(seed, rows=None):
    return 3 * torch.randn(rows or len(OPTIONS), V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_together_as_alone(dtype):
    together, alone, some = samplers(), samplers(), samplers()
    for step in range(20):
        given = logits(step).to(dtype)
        kept = given.clone()
        want = torch.cat([s.choose(row) for s, row in zip(alone, given)])
        assert torch.equal(choose(together, given), want)
        chosen = torch.cat([choose(some[i::3], given[i::3]) for i in range(3)])
        assert torch.equal(chosen, torch.cat([want[i::3] for i in range(3)]))
        assert torch.equal(given, kept), "logits are the caller's"
    for a, b in zip(together, alone):
        assert torch.equal(a.generator.get_state(), b.generator.get_state())
        for mine, other in ((a.counts, b.counts), (a.seen, b.seen)):
            assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))


def plainly(x, o, generator):
    """One row, said again."""
    if o.temperature == 0:
        return int(x.argmax())
    if o.top_k and o.top_k < V:
        x = x.masked_fill(x < x.sort(descending=True).values[o.top_k - 1], -torch.inf)
    probs = (x.double() / o.temperature).softmax(-1)
    keep = probs >= o.min_p * probs.max()
    probs = torch.where(keep, probs, 0.0) / probs[keep].sum()
    taken, total = torch.zeros(V, dtype=torch.bool), 0.0
    for token in probs.argsort(descending=True).tolist():
        if total >= o.top_p:
            break
        taken[token], total = True, total + float(probs[token])
    noise = torch.empty(V).exponential_(generator=generator)
    return int((torch.where(taken, probs, 0.0) / noise).argmax())


@pytest.mark.parametrize("at", range(len(OPTIONS)))
def test_each_option_is_what_it_says(at):
    options, x = Sampling(**OPTIONS[at]), logits(at, 60)
    one, two = (torch.Generator().manual_seed(4) for _ in range(2))
    for row in x:
        assert int(draw(row[None], [options], [one])) == plainly(row, options, two)


def test_a_cold_row_beside_a_warm_one_takes_the_first_of_the_likeliest():
    x = torch.zeros(2, V)
    x[:, [40, 90]] = 2.0
    options = [Sampling(), Sampling(temperature=1.0)]
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    before = generators[0].get_state()
    assert int(draw(x, options, generators)[0]) == 40 == int(x[0].argmax())
    assert torch.equal(generators[0].get_state(), before), "a cold row draws nothing"


@pytest.mark.gpu
def test_together_as_alone_on_a_gpu():
    def made():
        return [Sampler(Sampling(seed=i, **o), [1, 2], 4096, torch.device("cuda")) for i, o in enumerate(OPTIONS[:-1])]

    together, alone = made(), made()
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(10):
        given = torch.randn(len(together), 4096, device="cuda", generator=generator).bfloat16() * 3
        assert torch.equal(choose(together, given), torch.cat([s.choose(row) for s, row in zip(alone, given)]))
