"""Rotary position embedding beyond the conformance cases: gradcheck, transformers' tables, strides, planted bugs."""

import pytest
import support
import torch

from riftco import nn
from riftco.functional import rope, rope_tables
from riftco.kernels.rope import cases, op
from riftco.kernels.rope.tables import rope_frequencies

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


def inputs(*tokens, H=3, K=1, D=8, R=8, dtype=torch.float32, device="cpu"):
    q, k = (torch.randn(*tokens, n, D, dtype=dtype, device=device) for n in (H, K))
    return q, k, *rope_tables(R, 16, theta=50.0, device=device)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(interleaved):
    q, k, cos, sin = inputs(2, 4, R=6, dtype=torch.float64)
    positions = torch.randint(0, 16, (2, 4))
    pair = q.requires_grad_(), k.requires_grad_()

    def f(a, b, **kw):
        return rope(a, b, 1.3 * cos, 1.3 * sin, positions=positions, interleaved=interleaved, **kw)

    assert torch.autograd.gradcheck(f, pair)
    assert torch.autograd.gradgradcheck(f, pair)
    assert torch.autograd.gradgradcheck(lambda a, b: f(a, b, impl="spec"), pair)


def test_a_rotation_by_hand():
    """At position 1 the first pair turns by one radian; position 0 turns nothing."""
    cos, sin = rope_tables(4, 2)
    x = torch.zeros(2, 1, 4)
    x[:, 0, 0] = 1.0
    c, s = torch.cos(torch.tensor(1.0)), torch.sin(torch.tensor(1.0))
    half, _ = rope(x, x, cos, sin)
    pairs, _ = rope(x, x, cos, sin, interleaved=True)
    torch.testing.assert_close(half[:, 0], torch.tensor([[1.0, 0, 0, 0], [c, 0, s, 0]]))
    torch.testing.assert_close(pairs[:, 0], torch.tensor([[1.0, 0, 0, 0], [c, s, 0, 0]]))


SCALINGS = {
    "none": None,
    "default with theta": dict(rope_type="default", rope_theta=500000.0),
    "partial": dict(rope_type="default", partial_rotary_factor=0.5),
    "linear": dict(rope_type="linear", factor=4.0),
    "linear, old key": dict(type="linear", factor=2.0),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "llama3, no original": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "yarn, no original": dict(rope_type="yarn", factor=4.0),
    "yarn, own factor": dict(rope_type="yarn", factor=4.0, attention_factor=1.7, beta_fast=16, beta_slow=2),
    "yarn, mscale": dict(rope_type="yarn", factor=40.0, mscale=0.7, mscale_all_dim=1.0, truncate=False),
    "longrope": dict(
        rope_type="longrope",
        short_factor=[1.0] * 16,
        long_factor=[1 + i / 4 for i in range(16)],
        factor=4.0,
        original_max_position_embeddings=64,
    ),
    "longrope, no factor": dict(
        rope_type="longrope", short_factor=[1.0] * 16, long_factor=[2.0] * 16, original_max_position_embeddings=64
    ),
    "longrope, short": dict(
        rope_type="longrope",
        short_factor=[1 + i / 9 for i in range(16)],
        long_factor=[2.0] * 16,
        original_max_position_embeddings=256,
        attention_factor=1.3,
    ),
    "proportional": dict(rope_type="proportional", partial_rotary_factor=0.25, factor=8.0),
    "proportional, whole": dict(rope_type="proportional"),
    "yarn, partial": dict(rope_type="yarn", factor=2.0, partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 50.0])
def test_tables_are_transformers(name, theta):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    D, max_position = 32, 256
    scaling = SCALINGS[name] or dict(rope_type="default")
    config = llama.LlamaConfig(
        hidden_size=2 * D,
        num_attention_heads=2,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    kind = scaling.get("rope_type") or scaling["type"]
    if kind == "default":
        R = int(D * scaling.get("partial_rotary_factor", 1.0))
        inv_freq = 1.0 / (scaling.get("rope_theta", theta) ** (torch.arange(0, R, 2).float() / R))
        factor = 1.0
    else:
        length = {"seq_len": max_position} if kind == "longrope" else {}
        inv_freq, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu", **length)
    ours, our_factor = rope_frequencies(D, max_position, theta=theta, scaling=SCALINGS[name])
    torch.testing.assert_close(ours, inv_freq, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-12)
    cos, sin = rope_tables(D, max_position, theta=theta, scaling=SCALINGS[name])
    angles = torch.arange(max_position)[:, None].float() * inv_freq
    torch.testing.assert_close(cos, angles.cos() * factor, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, angles.sin() * factor, atol=1e-4, rtol=0)
    assert torch.equal(rope_frequencies(D, max_position, theta=theta, scaling=SCALINGS[name])[0], ours)


def test_dynamic_beyond_the_original_length():
    """A table longer than the original context is transformers' for a sequence of that length."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling = dict(rope_type="dynamic", factor=3.0, rope_theta=10000.0)
    config = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=100, rope_parameters=dict(scaling)
    )
    want, _ = utils.ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=300)
    ours, _ = rope_frequencies(32, 300, scaling={**scaling, "original_max_position_embeddings": 100})
    torch.testing.assert_close(ours, want, rtol=1e-6, atol=0)
    assert not torch.allclose(ours, rope_frequencies(32, 300)[0])


def test_is_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    q, k, _, _ = inputs(2, 7, H=4, K=2, D=16)
    positions = torch.randint(0, 100, (2, 7))
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    want = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(nn.RotaryEmbedding(16, 128)(q, k, positions), want)


def test_module_keeps_float32_tables():
    cos, sin = rope_tables(8, 16)
    module = nn.RotaryEmbedding(8, 16, device="meta").to_empty(device="cpu").to(torch.bfloat16)
    assert torch.equal(module.cos, cos) and torch.equal(module.sin, sin) and not module.state_dict()
    q, k, *_ = inputs(4, dtype=torch.bfloat16)
    for got, want in zip(module(q, k), rope(q, k, cos, sin)):
        assert torch.equal(got, want)


def test_opcheck():
    q, k, cos, sin = inputs(2, 5, R=6)
    by_head = k.transpose(0, 1).contiguous().transpose(0, 1)
    for positions in (None, torch.randint(0, 16, (2, 5))):
        for interleaved in (False, True):
            torch.library.opcheck(op.turn, ([q, by_head], cos, sin, positions, interleaved, True))
            torch.library.opcheck(op.turn_inplace, ([q, k], cos, sin, positions, interleaved))
    torch.library.opcheck(op.turn, ([k], cos, sin, None, False, False))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()
    fn = torch.compile(rope, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for T in (5, 9):
            q, k, cos, sin = inputs(2, T, device=device.torch_device)
            positions = torch.randint(0, 16, (T,), device=q.device)
            results = []
            for f in (rope, fn):
                a, b = q.clone().requires_grad_(), k.clone().requires_grad_()
                out = f(a, b, cos, sin, positions=positions)
                results.append((*out, *torch.autograd.grad(sum(o.square().sum() for o in out), (a, b))))
            assert all(torch.equal(x, y) for x, y in zip(*results))
            with torch.no_grad():
                a, b = q.clone(), k.clone()
                fn(a, b, cos, sin, positions=positions, inplace=True)
            assert torch.equal(a, results[0][0]) and torch.equal(b, results[0][1])


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """A fused qkv tensor, transposed layouts, expanded heads and table slices give what contiguous copies give."""
    d = device.torch_device
    fused = torch.randn(2, 6, 7, 8, device=d)
    by_head = torch.randn(2, 7, 6, 8, device=d).transpose(1, 2)
    wide_cos, wide_sin = (t.repeat(1, 2)[:, ::2] for t in rope_tables(8, 40, device=d))
    views = {
        "fused": (fused[:, :, :4], fused[:, :, 4:6]),
        "heads first": (by_head[:, :, :4], by_head[:, :, 4:6]),
        "expanded": (fused[:, :, :1].expand(2, 6, 4, 8), fused[:1, :, :2].expand(2, 6, 2, 8)),
        "dim stride": (fused[:, :, :4].transpose(2, 3).contiguous().transpose(2, 3), fused[:, :, :2].flip(-1)),
        "five dimensions": (fused.view(2, 2, 3, 7, 8).transpose(0, 1), fused.view(2, 2, 3, 7, 8)[..., :2, :]),
        "packed": (fused[0, :, 2:5], fused[1, :, :1]),
    }
    with device.use():
        for name, pair in views.items():
            positions = torch.randint(0, 40, (*pair[0].shape[:-2], 2), device=d)[..., 1]
            d_out = [torch.randn(t.shape[::-1], device=d).permute(*range(t.dim() - 1, -1, -1)) for t in pair]
            results = []
            for x, c, s in (
                (pair, wide_cos, wide_sin),
                ([t.contiguous() for t in pair], wide_cos.contiguous(), wide_sin.contiguous()),
            ):
                x = [t.detach().requires_grad_() for t in x]
                out = rope(*x, c, s, positions=positions)
                assert all(o.is_contiguous() for o in out)
                results.append((*out, *torch.autograd.grad(out, x, d_out)))
            assert all(torch.equal(p, q) for p, q in zip(*results)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_inplace(device, interleaved):
    """Writes over views of one fused tensor, leaves the rest of it alone, and gives the same numbers."""
    fused = torch.randn(2, 6, 7, 10, device=device.torch_device)
    before = fused.clone()
    cos, sin = rope_tables(6, 16, device=fused.device)
    with device.use():
        want = rope(fused[:, :, :4], fused[:, :, 4:6], cos, sin, interleaved=interleaved)
        q, k = rope(fused[:, :, :4], fused[:, :, 4:6], cos, sin, interleaved=interleaved, inplace=True)
    assert q.data_ptr() == fused.data_ptr()
    assert torch.equal(fused, torch.cat((*want, before[:, :, 6:]), 2))
    assert torch.equal(k, want[1])


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """Nothing to turn, positions outside the tables, positions of other shapes and widths."""
    d = device.torch_device
    with device.use(), support.poisoned():
        for tokens in ((0,), (2, 0), (0, 3)):
            q, k, cos, sin = inputs(*tokens, device=d)
            q.requires_grad_()
            out = rope(q, k, cos, sin, positions=torch.zeros(tokens, dtype=torch.long, device=d))
            assert torch.autograd.grad(out[0].sum(), q)[0].shape == q.shape
        q, k, cos, sin = inputs(2, 5, K=0, device=d)
        assert rope(q, k, cos, sin)[1].shape == k.shape
        q, k, cos, sin = inputs(2, 5, R=4, device=d)
        positions = torch.tensor([3, -1, 15, 16, 0], device=d)
        out = rope(q, k, cos, sin, positions=positions)
        bad = torch.tensor([False, True, False, True, False], device=d)
        for o, x in zip(out, (q, k)):
            assert torch.equal(o[..., :4].isnan().all(-1).all(-1), bad.expand(2, 5))
            assert torch.equal(o[..., 4:], x[..., 4:]) and o[:, ~bad].isfinite().all()
        for same in (positions.int(), positions[None], positions.expand(2, 5)):
            for a, b in zip(rope(q, k, cos, sin, positions=same), out):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_asked_for(device, monkeypatch):
    """One launch forward; backward turns the gradients that are wanted and no others."""
    turned = []
    real = op.turn
    monkeypatch.setattr(op, "turn", lambda x, *a: turned.append(len(x)) or real(x, *a))
    q, k, cos, sin = inputs(2, 5, device=device.torch_device)
    with device.use():
        for need in ((True, False), (False, True), (True, True)):
            a, b = q.clone().requires_grad_(need[0]), k.clone().requires_grad_(need[1])
            turned.clear()
            sum(o.square().sum() for o in rope(a, b, cos, sin)).backward()
            assert turned == [2, sum(need)]
            assert (a.grad is not None, b.grad is not None) == need
        turned.clear()
        rope(a, b, cos, sin)[1].sum().backward()  # q's gradient does not exist
        assert turned == [2, 1]


def test_modes(monkeypatch):
    q, k, cos, sin = inputs(2, 5)
    with torch.inference_mode():
        want = rope(q, k, cos, sin)
    with torch.no_grad():
        out = rope(q.requires_grad_(), k, cos, sin)
        assert torch.equal(out[0], want[0]) and not out[0].requires_grad
    q = q.detach()
    grad = torch.func.grad(lambda t: rope(t, k, cos, sin)[0].square().sum())(q)
    torch.testing.assert_close(grad, 2 * q, rtol=1e-4, atol=1e-5)  # a rotation keeps the norm
    with torch.autocast("cpu", torch.bfloat16):
        assert rope(q, k.bfloat16(), cos, sin)[0].dtype == torch.float32
    q.requires_grad_()
    recomputed = torch.utils.checkpoint.checkpoint(rope, q, k, cos, sin, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(recomputed[0].square().sum(), q)[0], grad)
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    with pytest.raises(IndexError, match="position 16 of token 4, but the tables have 16"):
        rope(q, k, cos, sin, positions=torch.tensor([0, 1, 2, 3, 16]))


def test_errors():
    q, k, cos, sin = inputs(2, 5)
    for bad, text in [
        (lambda: rope(q[0, 0], k, cos, sin), r"q must be floating \[..., T, heads, D\]"),
        (lambda: rope(q[..., :6], k, cos, sin), "head dim 6, less than the tables' 8"),
        (lambda: rope(q, k[:1], cos, sin), "same tokens"),
        (lambda: rope(q, k, cos.double(), sin), "cos must be float32"),
        (lambda: rope(q, k, cos, sin[:3]), "sin must be float32"),
        (lambda: rope(q, k, cos[:4], sin[:4]), "5 tokens, but the tables have 4 rows"),
        (lambda: rope(q, k, cos, sin, positions=torch.zeros(3, dtype=torch.long)), r"\(2, 5\); got torch.int64 \(3,\)"),
        (lambda: rope(q, k, cos, sin, positions=torch.zeros(2, 5)), "int32 or int64"),
        (lambda: rope(q, k.to("meta"), cos, sin), "k on meta"),
        (lambda: rope(q, k, cos, sin, impl="fast"), "'fast'"),
        (lambda: rope(q.clone().requires_grad_(), k, cos, sin, inplace=True), "records no gradient"),
        (lambda: rope(q[:1].expand(2, 5, 3, 8), k, cos, sin, inplace=True), "expanded"),
        (lambda: rope(q, q, cos, sin, inplace=True), "two tensors"),
        (lambda: rope(q, k, cos.clone().requires_grad_(), sin), "cos is not differentiable"),
        (lambda: rope_tables(8, 4, scaling=dict(rope_type="spiral")), "'spiral' is not supported"),
        (lambda: rope_tables(8, 4, scaling=dict(rope_type="longrope")), "needs short_factor, long_factor"),
        (
            lambda: rope_tables(
                8,
                4,
                scaling=dict(
                    rope_type="longrope", short_factor=[1.0], long_factor=[1.0], original_max_position_embeddings=4
                ),
            ),
            "short_factor must hold 4 numbers; got 1",
        ),
        (lambda: rope_tables(8, 4, scaling=dict(rope_type="llama3", factor=2.0)), "needs low_freq_factor, high_freq"),
        (lambda: rope_tables(7, 4), "even and positive; got 7"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("s = -s", "s = s", "half, grouped heads"),
        ("tl.join(a * c - b * s, b * c + a * s)", "tl.join(a * c - b * s, b * c - a * s)", "interleaved"),
        ("second = first + half", "second = first + half - 1", "half, grouped heads"),
        ("for start in range(0, H, HEADS)", "for start in range(0, HEADS, HEADS)", "more heads than a block"),
        ("if REST:", "if False:", "partial"),
        (".to(tl.int64) if HAS_POSITIONS else t", ".to(tl.int64) * 0 + t if HAS_POSITIONS else t", "packed, positions"),
    ],
)
def test_planted_bugs(old, new, case):
    support.assert_caught(cases, "riftco.kernels.rope.cuda", old, new, case)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("table[1], value=-1)", "table[1])", "half, grouped heads"),
        ("a.copy_(source).unflatten(-1, (half, 2))).mul_(table[0])", "a.copy_(source).unflatten(-1, (half, 2)))",
         "interleaved"),
        ("        o[..., R:].copy_(t[..., R:])\n", "        o[..., R:].zero_()\n", "partial"),
        ("spec.angles(x[0].shape[-3], cos, sin, positions, transpose)",
         "spec.angles(x[0].shape[-3], cos, sin, None, transpose)", "packed, positions"),
        ("positions, transpose)", "positions, False)", "half, grouped heads"),
    ],
)  # fmt: skip
def test_planted_bugs_on_the_cpu(old, new, case):
    support.assert_caught(cases, "riftco.kernels.rope.cpu", old, new, case, device="cpu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_tokens_on_the_cpu(monkeypatch, dtype, interleaved):
    """Cut into blocks with a rest, in place and not, bit for bit what one block gives."""
    q, k = torch.randn(2, 13, 4, 10, dtype=dtype), torch.randn(2, 13, 2, 10, dtype=dtype)
    cos, sin = rope_tables(8, 13)
    whole = rope(q, k, cos, sin, interleaved=interleaved)
    monkeypatch.setattr("riftco.kernels._blocks.EACH", 200)
    for got, want in zip(rope(q, k, cos, sin, interleaved=interleaved), whole):
        assert torch.equal(got, want)
    rope(q, k, cos, sin, interleaved=interleaved, inplace=True)
    assert torch.equal(q, whole[0]) and torch.equal(k, whole[1])
