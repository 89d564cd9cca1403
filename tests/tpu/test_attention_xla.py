"""Attention as XLA runs it: every option over several tiles, no T x S matrix, and a graph that does not grow."""

import re
import time

import pytest
import support
import torch
from host_loop import serving_the_cpu
from xla_graph import recorded

from riftco.functional import attention
from riftco.kernels.attention import cases
from riftco.tpu import _tiles
from riftco.tpu import attention as launcher

CASES = (*cases.OPTION_CASES, *(c for c in cases.PLAIN_CASES if "cu_q" in c.options))


def forward(*args):
    return launcher.forward(*args)


def backward(*args):
    return launcher.backward(*args)


def on_the_cpu():
    return serving_the_cpu(__name__, launcher, "attention", cases, ROWS=16, KEYS=24)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_the_launcher_is_the_spec(case):
    with on_the_cpu() as check:
        check(case=case, dtype=torch.float32)


@support.xla
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_several_tiles_in_the_devices_loop(case, device, monkeypatch):
    monkeypatch.setattr(launcher, "ROWS", 48)
    monkeypatch.setattr(launcher, "KEYS", 16)
    support.check_case(cases, case, torch.float32, device)


def graph_of(T: int, **options):
    """(HLO of forward and backward, how long it took to compile and run), D 8, one head."""
    import torch_xla

    q, k, v = (torch.randn(1, T, 1, 8).to("xla").requires_grad_() for _ in range(3))
    options = {n: t.to("xla").requires_grad_() if n == "bias" else t for n, t in options.items()}
    leaves = (q, k, v, *(t for n, t in options.items() if n == "bias"))
    started = time.process_time()
    with recorded() as record:
        out = attention(q, k, v, causal=True, **options)
        grads = torch.autograd.grad(out.sum(), leaves)
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([out, *grads])
    assert (record.compiles, record.executions, record.fallbacks) == (1, 1, [])
    return hlo, time.process_time() - started


@support.xla
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "dropout_p": 0.5, "window": (1000, None)}])
def test_no_matrix_of_all_scores(device, options):
    T = 2 * launcher.KEYS + 64
    if options:
        options = {**options, "bias": torch.randn(1, 1, 1, T)}
    hlo, _ = graph_of(T, **options)
    padded = 3 * launcher.KEYS
    assert re.search(rf"f32\[1,1,{launcher.ROWS},{launcher.KEYS}\]", hlo), "the tiles are where they are looked for"
    assert not re.search(rf"({T}|{padded}),({T}|{padded})[\],]", hlo)


@support.xla
def test_the_graph_is_the_same_at_any_length(device):
    """8192 rows are 136 pairs of tiles in the loops of 1024 rows' 3: as many instructions, no more time to compile."""
    short, _ = graph_of(1024)
    long, seconds = graph_of(8192)
    count = [len(re.findall(r"^\s+(?:ROOT )?%", hlo, re.MULTILINE)) for hlo in (short, long)]
    assert count[0] == count[1] > 100
    assert len(re.findall(r" while\(", long)) == 2  # forward, backward
    assert seconds < 60


def test_pairs_that_no_mask_can_reach_are_left_out():
    def pairs(T, S, **options):
        q, k = torch.empty(1, T, 1, 8), torch.empty(1, S, 1, 8)
        plain = dict.fromkeys(("cu_q", "cu_k", "k_lens", "bias", "seed", "scale", "left", "right"))
        plain |= {"softcap": 0.0, "dropout_p": 0.0, "rows": 16, "keys": 16}
        if "cu_q" in options:
            q, k = q[0], k[0]
        return [*_tiles.Tiles(q, k, **{**plain, **options}).pairs()]

    assert pairs(48, 48, right=0) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert pairs(48, 48, right=0, cu_q=torch.tensor([0, 20, 48])) == pairs(48, 48, right=0)
    assert pairs(48, 48, left=4, right=0) == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]
    assert pairs(16, 48, right=0) == [(0, 0), (0, 1), (0, 2)]
    assert len(pairs(48, 48, right=0, cu_q=torch.tensor([0, 48]), cu_k=torch.tensor([0, 9]))) == 9


@pytest.mark.parametrize(
    "old,new,name",
    [
        ("put(state[name], i, value)", "put(state[name], i, value * 1.01)", "causal, several tiles"),
        ("for i, j in pairs if j < cut", "for i, j in pairs if j <= cut", "gradients of the last keys"),
        ("d_p if kept is None else d_p * kept) - at", "d_p) - at", "dropout"),
        ("d_s * (1.0 - (capped", "d_s * (1.0 + (capped", "softcap"),
    ],
)
def test_planted_bugs(old, new, name):
    case = next(c for c in cases.CASES if c.name == name)
    with support.mutant("riftco.tpu.attention", old, new), on_the_cpu() as check, pytest.raises(AssertionError):
        check(case=case, dtype=torch.float32)
