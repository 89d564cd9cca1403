"""Attention's shaders: routes, layouts, empty inputs, values that are not finite, work beyond the grid."""

import re

import metal_emulator
import pytest
import support
import torch

import riftco
import riftco.metal
from riftco.functional import attention
from riftco.kernels._check import inputs_of, outputs_and_grads, to
from riftco.kernels.attention import cases
from riftco.metal import attention_route
from riftco.metal.attention_route import route

DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")
FORWARD, BACKWARD, ROWS = "attention_forward", "attention_backward", "attention_rows"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def case_named(name: str):
    return next(c for c in cases.CASES if c.name == name)


def changed(shader: str, old: str, new: str) -> str:
    """The shader with `old`, found once, as `new`; its float32 kernels up to head dim 64 alone: compiled faster."""
    text = riftco.metal.source(shader)
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {shader}"
    return re.sub(r'(?m)^INSTANTIATE\((?!64, "f32"|"f32").*$', "", text.replace(old, new))


@pytest.fixture
def plant(monkeypatch):
    """Launch from a shader in which `old`, found once, became `new`."""
    real = riftco.metal.source

    def planted(shader: str, old: str, new: str) -> str:
        text = changed(shader, old, new)
        monkeypatch.setattr(riftco.metal, "source", lambda name: text if name == shader else real(name))
        return text

    return planted


@pytest.fixture
def no_matrices(monkeypatch):
    """As on a Mac whose GPU has no simdgroup matrices."""
    monkeypatch.setattr(attention_route, "simdgroup_matrices", lambda: False)


def check(case: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    with metal_emulator.schedule(seed):
        support.check_case(cases, case_named(case), dtype, DEVICE)


def launches(case: str, dtype: torch.dtype = torch.float32) -> dict[str, metal_emulator.Job]:
    """The case's launches by kernel, without dtype and width."""
    inputs = to(inputs_of(cases, case_named(case), dtype), dtype, "cpu")
    with DEVICE.use(), support.poisoned(), metal_emulator.recording() as jobs:
        outputs_and_grads(cases.call, cases, case_named(case), inputs)
    return {re.sub(r"(_\d+)?_b?f\d+$", "", j.kernel): j for j in jobs}


def replay(job, sanitizer: str, seed: int = 0):
    if reason := metal_emulator.why_not_sanitizer(sanitizer):
        pytest.skip(reason)
    return job.replay(sanitizer, seed)


# A1.10: one pure function says which kernels run, and why.
@pytest.mark.parametrize(
    "dtype,D,Dv,matrices,name,width,why",
    [
        (torch.float16, 64, 64, True, "tiled", 64, "fits"),
        (torch.bfloat16, 65, 65, True, "tiled", 128, "fits"),
        (torch.float16, 256, 256, True, "tiled", 256, "fits"),
        (torch.float32, 128, 128, True, "tiled", 128, "fits"),
        (torch.float32, 129, 129, True, "rows", 0, "no tile fits 32 KiB"),
        (torch.float16, 512, 512, True, "rows", 0, "no tile fits 32 KiB"),
        (torch.float16, 64, 32, True, "rows", 0, "differ"),
        (torch.float16, 64, 64, False, "rows", 0, "no simdgroup matrices"),
    ],
)
def test_route(dtype, D, Dv, matrices, name, width, why):
    found = route(dtype, D, Dv, matrices=matrices)
    assert (found.name, found.width) == (name, width) and why in found.why


@pytest.mark.parametrize("option", ["bias", "dropout"])
def test_what_has_no_shader_is_composed_by_name(option):
    found = route(torch.float16, 64, 64, options=frozenset({option}))
    assert found.name == "composed" and option in found.why
    rows = {r["op"]: r for r in riftco.explain("mps", torch.float16) if r["op"].startswith("attention_")}
    assert rows["attention_fwd"]["implementation"] == "riftco.metal.attention:forward"
    assert rows[f"attention_bwd, with {option}"]["implementation"] == "composed"
    assert rows["attention_fwd, head dim 256"]["implementation"] == "tiled"
    assert rows["attention_fwd, head dim 512"]["implementation"] == "rows"


def test_which_gpus_have_simdgroup_matrices(monkeypatch):
    for machine, has in (("arm64", True), ("x86_64", False)):
        monkeypatch.setattr(attention_route.platform, "system", lambda: "Darwin")
        monkeypatch.setattr(attention_route.platform, "machine", lambda machine=machine: machine)
        assert attention_route.simdgroup_matrices() is has


@pytest.mark.parametrize(
    "options,composed",
    [({}, False), ({"bias": torch.zeros(9)}, True), ({"dropout_p": 0.5}, True), ({"softcap": 1.0}, False)],
)
def test_calls_take_the_route_that_is_named(options, composed):
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    kv = torch.randn(1, 9, 1, 8)
    with DEVICE.use(), metal_emulator.recording() as jobs:
        attention(q, kv, kv, **options).sum().backward()
    assert [j.kernel for j in jobs] == (
        [] if composed else ["attention_fwd_64_f32", "attention_delta_f32", "attention_dq_64_f32"]
    )


ROW_CASES = (  # of every kind that the kernels of one row must know
    "causal, more keys", "packed, more keys", "packed, spare rows of NaN", "packed, window", "softcap", "packed, sinks",
    "key lengths", "window, rows without keys", "gradients of the last keys",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_simdgroup_matrices(no_matrices, dtype):
    """A row at a time, under every schedule: the dtypes take the cases in turn."""
    for n, case in enumerate(ROW_CASES):
        for seed in range(5):
            if (n + seed) % 3 == DTYPES.index(dtype):
                check(case, seed, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c.name for c in cases.CASES])
def test_every_case_without_simdgroup_matrices(no_matrices, case, dtype):
    for seed in range(5):
        check(case, seed, dtype)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers_without_simdgroup_matrices(no_matrices, sanitizer):
    jobs = {**launches("packed, window", torch.float16), **launches("gradients of the last keys", torch.bfloat16)}
    assert set(jobs) == {"attention_rows_fwd", "attention_delta", "attention_rows_dq", "attention_rows_dkdv"}
    for job in jobs.values():
        found = replay(job.with_groups(16), sanitizer, 3)
        assert found.status == 0, found.report


def test_more_keys_than_a_block_a_row_at_a_time(plant):
    """The running maximum of one block meets the next one's; the bug shows that this case would see it."""
    case = cases.Case("many keys", dict(B=1, T=3, S=140, H=1, K=1, D=8, DV=9))
    support.check_case(cases, case, torch.float32, DEVICE)
    plant(ROWS, "total * shrink + rescaled(all, top).sum", "total * shrink + all.sum")
    with pytest.raises(AssertionError):
        support.check_case(cases, case, torch.float32, DEVICE)


def test_a_missing_simdgroup_barrier_is_a_race():
    around = "my_scores + n * 8, BK);\n        simdgroup_barrier(mem_flags::mem_threadgroup);"
    broken = changed(FORWARD, around, around.partition("\n")[0])
    assert "data race" in replay(launches("odd sizes")["attention_fwd"].with_source(broken), "thread").report


def test_a_missing_barrier_gives_wrong_numbers(plant):
    """Under some schedule."""
    around = "stage<T, BK, DMAX>(kv_tile, keys, p.k, begin, {begin, all.hi}, D, thread_index);\n      " + BARRIER
    plant(FORWARD, around, around.replace(BARRIER, ""))
    failed = 0
    for seed in range(4):
        try:
            check("odd sizes", seed)
        except AssertionError:
            failed += 1
    assert failed


@pytest.mark.parametrize("shader,kernel,case", [
    (FORWARD, "attention_fwd", "causal, several tiles"), (BACKWARD, "attention_dq", "causal, several tiles"),
    (BACKWARD, "attention_dkdv", "gradients of the last keys"), (ROWS, "attention_rows_fwd", "head dims differ"),
    (ROWS, "attention_rows_dkdv", "head dims differ"),
])  # fmt: skip
def test_threadgroups_take_what_others_leave(shader, kernel, case):
    """One threadgroup alone makes the same numbers, without a race between its tiles."""
    job = launches(case)[kernel]
    assert job.grid[0] > job.group[0]
    few = job.with_groups(1)
    assert few.replay("none").buffers == job.replay("none").buffers
    assert replay(few, "thread").status == 0


def test_a_divergent_simd_operation_is_caught(plant):
    plant(FORWARD, "if (simd_any(shrink != 1.0f))", "if (lane < 8 && simd_any(shrink != 1.0f))")
    with pytest.raises(RuntimeError, match=r"different simd operations|divergence"):
        check("odd sizes")


@pytest.mark.parametrize("D,Dv", [(16, 16), (16, 24)], ids=["tiled", "rows"])
def test_any_strides(D, Dv):
    """Transposed, sliced, expanded and offset operands, and an expanded upstream gradient: no copy, the same bits."""
    base = torch.randn(2, 3, 40, D + 8).transpose(1, 2)
    q = base[..., 4 : D + 4]
    k = torch.randn(2, 1, 1, D).expand(2, 20, 1, D)
    v = torch.randn(Dv, 2, 20, 1).permute(1, 2, 3, 0)
    d_out = torch.randn(1, 40, 3, 1).expand(2, 40, 3, Dv)

    def run(*tensors):
        *leaves, g = (t.detach().requires_grad_() for t in tensors)
        with DEVICE.use(), support.poisoned():
            out, lse = attention(*leaves, causal=True, return_lse=True)
            return out, lse, *torch.autograd.grad(out, leaves, g)

    for got, want in zip(run(q, k, v, d_out), run(*(t.contiguous() for t in (q, k, v, d_out)))):
        assert torch.equal(got, want)


@pytest.mark.parametrize("B,T,S", [(0, 3, 3), (2, 0, 5), (2, 4, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_nothing_to_see(B, T, S, sinks):
    q, k, v = (torch.randn(B, n, 2, 8, requires_grad=True) for n in (T, S, S))
    sink = torch.zeros(2, requires_grad=True) if sinks else None
    leaves = [t for t in (q, k, v, sink) if t is not None]
    with DEVICE.use(), support.poisoned():
        out, lse = attention(q, k, v, sinks=sink, return_lse=True)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert not out.any() and torch.equal(lse, torch.full((B, 2, T), 0.0 if sinks else -torch.inf))
    assert not any(g.any() for g in grads) and [g.shape for g in grads] == [t.shape for t in leaves]


@pytest.mark.parametrize("Dv", [8, 16], ids=["tiled", "rows"])
@pytest.mark.parametrize("filler", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["q", "k"])
def test_not_finite_values_reach_what_they_touch(Dv, filler, which):
    """As the spec says, and no other row."""
    q, k, v = torch.randn(1, 20, 1, 8), torch.randn(1, 20, 1, 8), torch.randn(1, 20, 1, Dv)
    (q if which == "q" else k)[0, 9, 0, 3] = filler
    with DEVICE.use():
        got = attention(q, k, v, causal=True, return_lse=True)
    for a, b in zip(got, attention(q, k, v, causal=True, return_lse=True, impl="spec")):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_float16_gradients_of_a_tiny_upstream():
    """A1.9: dO of 1e-6 is below what half precision holds well, and its gradients are still right."""
    q, k, v = (torch.randn(1, 40, 2, 16, dtype=torch.float16) for _ in range(3))
    d_out = torch.randn(1, 40, 2, 16) * 3e-5
    wants = [t.double().requires_grad_() for t in (q, k, v)]
    gots = [t.clone().requires_grad_() for t in (q, k, v)]
    with DEVICE.use():
        got = torch.autograd.grad(attention(*gots), gots, d_out.half())
    want = torch.autograd.grad(attention(*wants, impl="spec"), wants, d_out.half().double())
    for a, b in zip(got, want):
        smallest = 2.0**-24  # spacing of half precision down there
        assert (a.double() - b).abs().max() <= smallest / 2 + 1e-3 * b.abs().max()


def test_exponent_and_delta_as_the_contract_says():
    case = case_named("packed, spare rows of NaN")
    inputs = to(inputs_of(cases, case, torch.float16), torch.float16, "cpu")
    q, k, v, cu = (inputs[n] for n in ("q", "k", "v", "cu_q"))
    options = (cu, None, None, None, None, None, None, None, 0, 0.0, 0.0)
    d_out = torch.randn_like(q) * 0.01
    d_out[131:] = torch.nan
    both = []
    for impl in ("metal", "spec"):
        with riftco.kernels._contract.implementation(impl):
            out, lse = torch.ops.riftco.attention_fwd(q, k, v, *options)
            both.append(torch.ops.riftco.attention_bwd(
                d_out, None, q, k, v, out, lse, *options, 0, False, True, True, True, False, False
            ))  # fmt: skip
    assert torch.equal(both[0][6], both[1][6]) and both[0][6].unique().numel() > 1
    torch.testing.assert_close(both[0][5], both[1][5], atol=2e-4, rtol=1e-2)


@pytest.mark.slow
def test_offsets_beyond_32_bits():
    """Rows of k and v that lie 2^30 elements apart."""
    stride, S = 1 << 30, 4
    apart = torch.empty(stride * (S - 1) + 64, dtype=torch.float16).as_strided((1, S, 1, 8), (0, stride, 8, 1))
    near = torch.randn(1, S, 1, 8, dtype=torch.float16)
    apart.copy_(near)
    q = torch.randn(1, 3, 1, 8, dtype=torch.float16)
    for D in (8, 4):  # tiled; rows
        results = []
        for t in (apart, near):
            leaves = [q.clone().requires_grad_(), t]
            with DEVICE.use():
                out = attention(leaves[0], t, t[..., :D])
                results.append((out, *torch.autograd.grad(out.float().sum(), leaves[:1])))
        assert all(torch.equal(a, b) for a, b in zip(*results))
