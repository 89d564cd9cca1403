"""Every public function refuses what is of the wrong kind, in one line that names the argument, before any work."""

import math

import pytest
import torch

import riftco.functional as F
from riftco import explain
from riftco.kernels._arguments import FLOATING, floating, given, number, whole
from riftco.kernels._overlap import first_shared, lies_once, share_memory
from riftco.nn import NF4Linear
from riftco.optim import Adam


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


ids, q8 = torch.tensor([0, 2, 1]), F.GGUFWeight(torch.zeros(4, 34, dtype=torch.uint8), "Q8_0", (4, 32))
nf4 = F.quantize_nf4(rand(4, 32))
table = F.rope_tables(4, 8)
heads = dict(q=rand(1, 3, 2, 4), k=rand(1, 3, 2, 4), v=rand(1, 3, 2, 4))
packed = dict(zip(("q", "k_new", "v_new"), (rand(2, 2, 4) for _ in range(3))))
runs, cu = {name: rand(3, 2, 4) for name in "qkv"}, torch.tensor([0, 2, 3])
loss = dict(ignore_index=-100, label_smoothing=0.1, z_loss=0.1, softcap=5.0, logit_scale=2.0, denominator=3.0)
step = dict(lr=1e-3, eps=1e-8, weight_decay=0.1, gradient_clip=1.0)
CALLS = {  # function -> arguments that it takes, all of them; a number, a flag and a tensor are each spoilt in turn
    F.cross_entropy: dict(
        logits=rand(3, 5), target=ids, weight=rand(5), row_weight=rand(3), **loss, inplace=False, return_lse=False,
        return_metrics=False,
    ),
    F.topk_cross_entropy: dict(
        logits=rand(3, 5), ids=ids[:, None], weights=rand(3, 1), row_weight=rand(3), softcap=5.0, logit_scale=2.0,
        denominator=3.0,
    ),
    F.cross_entropy_time_range: dict(logits=rand(1, 3, 5), target=ids[None], start=0, end=2),
    F.per_token_logprobs: dict(logits=rand(3, 5), target=ids, temperature=2.0, ignore_index=-1),
    F.linear_cross_entropy: dict(
        x=rand(3, 4), weight=rand(5, 4), target=ids, bias=rand(5), row_weight=rand(3), class_weight=rand(5), **loss,
        slice_bytes=1 << 20, n_labelled=3, shift=False, checkpoint=False, return_lse=False, return_metrics=False,
    ),
    F.cce_linear_cross_entropy: dict(e=rand(3, 4), c=rand(5, 4), targets=ids, softcap=5.0, shift=1),
    F.swiglu: dict(gate=rand(3, 4), up=rand(3, 4)),
    F.geglu: dict(gate=rand(3, 4), up=rand(3, 4)),
    F.rms_norm: dict(x=rand(3, 4), weight=rand(4), eps=1e-6, residual=rand(3, 4), offset=1.0),
    F.layer_norm: dict(x=rand(3, 4), weight=rand(4), bias=rand(4), eps=1e-6, residual=rand(3, 4)),
    F.rope: dict(
        q=heads["q"], k=heads["k"], cos=table[0], sin=table[1], positions=ids, interleaved=False, inplace=False
    ),
    F.rope_tables: dict(head_dim=4, max_position=8, theta=1e4),
    F.embedding: dict(
        input=ids, weight=rand(5, 4), padding_idx=1, max_norm=1.0, norm_type=2.0, scale_grad_by_freq=False, sparse=False
    ),
    F.gather_rows: dict(x=rand(5, 4), ids=ids),
    F.scatter_rows: dict(x=rand(5, 4), ids=ids, rows=rand(3, 4)),
    F.lora_linear: dict(
        x=rand(3, 4), weight=rand(5, 4), lora_a=rand(2, 4), lora_b=rand(5, 2), scale=2.0, bias=rand(5),
        magnitude=rand(5), dropout_p=0.5, training=False, rows=torch.tensor([0, 2]),
    ),
    F.nf4_linear: dict(x=rand(3, 32), q=nf4, bias=rand(4)),
    F.gguf_linear: dict(x=rand(3, 32), w=q8, bias=rand(4)),
    F.dequantize_nf4: dict(q=nf4, dtype=torch.float32),
    F.dequantize_gguf: dict(w=q8, dtype=torch.float32),
    F.quantize_nf4: dict(w=rand(4, 32), block_size=64, double_quant=True),
    q8.rows: dict(index=torch.tensor([1, 0])),
    F.attention: dict(
        **heads, causal=False, scale=0.5, softcap=5.0, sinks=rand(2), bias=rand(1, 1, 3, 3), dropout_p=0.1,
        k_lens=torch.tensor([2]), kv_grad_start=1, deterministic=True, return_lse=False,
    ),
    F.attention_with_cache: dict(
        **packed, cache=F.Cache.allocate(1, 2, 4, 2, 4), layer=0, slots=ids[:2], positions=ids[:2], scale=0.5,
        softcap=5.0, sinks=rand(2), max_seqlen_q=1, return_lse=False,
    ),
    F.Cache.allocate: dict(n_layers=1, slots=2, window=4, K=2, D=4, page_size=2, n_pages=4),
    F.scaled_dot_product_attention: dict(
        query=rand(1, 2, 3, 4), key=rand(1, 2, 3, 4), value=rand(1, 2, 3, 4), attn_mask=rand(3, 3), dropout_p=0.1,
        is_causal=False, scale=0.5, enable_gqa=False,
    ),
    F.flash_attn_func: dict(
        **heads, dropout_p=0.1, softmax_scale=0.5, causal=False, softcap=5.0, alibi_slopes=rand(2),
        learnable_sink=rand(2),
    ),
    F.flash_attn_varlen_func: dict(
        **runs, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.1,
        softmax_scale=0.5, causal=False, softcap=5.0,
    ),
    F.varlen_attn: dict(
        query=runs["q"], key=runs["k"], value=runs["v"], cu_seq_q=cu, cu_seq_k=cu, max_q=None, max_k=2, scale=0.5,
        enable_gqa=False, seqused_k=torch.tensor([2, 1]),
    ),
    F.flash_attn_with_kvcache: dict(
        q=heads["q"], k_cache=rand(1, 8, 2, 4), v_cache=rand(1, 8, 2, 4), k=heads["k"], v=heads["v"],
        cache_seqlens=torch.tensor([2]), cache_batch_idx=torch.tensor([0]), softmax_scale=0.5, causal=True,
        softcap=5.0, rotary_cos=table[0][:, :1], rotary_sin=table[1][:, :1], rotary_interleaved=False,
    ),
    F.torch_cross_entropy: dict(input=rand(3, 5), target=ids, weight=rand(5), ignore_index=-100, label_smoothing=0.1),
    F.torch_linear_cross_entropy: dict(
        input=rand(3, 4), linear_weight=rand(5, 4), target=ids, linear_bias=rand(5), weight=rand(5), ignore_index=-100,
        label_smoothing=0.1,
    ),
    F.liger_fused_linear_cross_entropy: dict(
        input=rand(3, 4), weight=rand(5, 4), target=ids, bias=rand(5), ce_weight=rand(5), ignore_index=-100,
        lse_square_scale=0.1, label_smoothing=0.1, softcap=5.0, return_z_loss=True, use_token_scaling=True,
        return_token_accuracy=True, return_predicted_tokens=True,
    ),
    F.lora_linear_group: dict(
        x=rand(3, 4), weights=[rand(5, 4)], lora_a=[rand(2, 4)], lora_b=[rand(5, 2)], scales=[2.0], biases=[rand(5)],
        dropout_p=0.5, training=False, rows=torch.tensor([0, 2]),
    ),
    F.adam_step: dict(
        params=[rand(3)], grads=[rand(3)], exp_avgs=[rand(3)], exp_avg_sqs=[rand(3).abs()], steps=[torch.zeros(())],
        **step, decoupled=True,
    ),
    Adam: dict(params=(rand(3),), **step, decoupled=True, state="paged", page_size=4096, device_bytes=1 << 20),
}  # fmt: skip
SAID = {  # by the function that a twin leads to
    "e": ("x must",), "c": ("weight",), "targets": ("target",), "input": ("ids", "x must"), "params": ("param",),
    "query": ("q, k, v",), "key": ("q, k, v",), "value": ("q, k, v",), "softmax_scale": ("scale",),
    "attn_mask": ("bias",), "is_causal": ("causal",), "learnable_sink": ("sinks",), "cu_seq_q": ("cu_seqlens_q",),
    "cu_seq_k": ("cu_seqlens_k",), "max_k": ("keys of a document",), "seqused_k": ("lengths of keys",),
    "ce_weight": ("class_weight",), "linear_bias": ("bias",), "weights": ("weight",), "biases": ("bias",),
    "scales": ("scale",), "lse_square_scale": ("z_loss",),
}  # fmt: skip
NOT_NUMBERS = ("1", True, [1], math.nan, 1j)
NOT_FLAGS = ("yes", 2.0, None)
OPTIONAL = ("softcap", "denominator", "n_labelled", "deterministic", "gradient_clip", "device_bytes", "page_size")


def _spoilt(name: str, value):
    """Values of the wrong kind for this argument."""
    if isinstance(value, bool):
        return tuple(v for v in NOT_FLAGS if v is not None or name not in OPTIONAL)
    if isinstance(value, (int, float)):
        numbers = tuple(v for v in NOT_NUMBERS if v is not True or name != "shift")
        return (*numbers, -math.inf, *(() if isinstance(value, float) else (1.5,)))
    if isinstance(value, torch.Tensor):
        others = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint8)
        return (*(value.to(dtype) for dtype in others), value.tolist(), "x")
    if isinstance(value, list) and isinstance(value[0], float):
        return tuple([bad] for bad in NOT_NUMBERS)
    if isinstance(value, list):
        return tuple(
            [bad]
            for bad in (None, value[0].to(torch.float8_e4m3fn), value[0].to(torch.complex64), 1.0)
            if bad is not None or name != "biases"
        )
    if isinstance(value, torch.dtype):
        return torch.int32, torch.float8_e4m3fn, torch.complex64, "float32"
    if isinstance(value, (F.NF4Weight, F.GGUFWeight)):
        return rand(4, 32), rand(4, 32).to(torch.float8_e4m3fn), None
    return ()


def _params():
    for function, arguments in CALLS.items():
        for name, value in arguments.items():
            if any(True for _ in _spoilt(name, value)):
                yield pytest.param(function, name, id=f"{getattr(function, '__qualname__', 'rows')}-{name}")


@pytest.mark.parametrize("function", list(CALLS), ids=lambda f: f.__qualname__)
def test_these_arguments_are_taken(function):
    arguments = dict(CALLS[function])
    if function is F.lora_linear:  # DoRA and a list of rows together need rows of the base as well
        arguments.pop("magnitude")
    function(**arguments)


@pytest.mark.parametrize("function,name", list(_params()))
def test_wrong_kinds_are_refused_by_name(function, name):
    for bad in _spoilt(name, CALLS[function][name]):
        with pytest.raises((TypeError, ValueError)) as refused:
            function(**{**CALLS[function], name: bad})
        text = str(refused.value)
        assert "\n" not in text and "got " in text, f"{name}={bad!r}: {text}"
        assert any(n in text for n in (name, *SAID.get(name, ()))), f"{name}={bad!r}: {text}"


def test_numbers_and_integers():
    for value in (1, 1.5, 0):
        number("op", "eps", value, "at least 0", least=0)
    whole("op", "n", 3, "at least 0", least=0)
    for bad in (True, None, "1", torch.tensor(1.0)):
        with pytest.raises(TypeError, match="op: eps must be a number, at least 0; got"):
            number("op", "eps", bad, "at least 0", least=0)
    for bad in (-1, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="op: eps must be at least 0; got"):
            number("op", "eps", bad, "at least 0", least=0)
    number("op", "clip", math.inf, "above 0", above=0, below=None)
    with pytest.raises(ValueError, match="above 0; got 0"):
        number("op", "clip", 0, "above 0", above=0, below=None)
    with pytest.raises(ValueError, match="within 64 bits; got"):
        whole("op", "n", 1 << 63, "within 64 bits")


def test_what_is_floating():
    assert all(floating(torch.zeros(2, dtype=d)) for d in FLOATING)
    assert not any(floating(t) for t in (None, 1.0, torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.int32)))
    assert "torch.float8_e5m2 (2,); floating is float16" in given(torch.zeros(2).to(torch.float8_e5m2))
    assert "sparse" in given(torch.zeros(2).to_sparse())


@pytest.mark.parametrize("denominator", [0, -2, math.nan, math.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("function", [F.cross_entropy, F.linear_cross_entropy, F.topk_cross_entropy])
def test_denominators(function, denominator, as_tensor, monkeypatch):
    monkeypatch.setenv("RIFTCO_CHECK", "1")  # a tensor's value costs a synchronisation
    arguments = {**CALLS[function], "denominator": torch.tensor(float(denominator)) if as_tensor else denominator}
    with pytest.raises(ValueError, match="denominator must be positive and finite; got"):
        function(**arguments)
    with pytest.raises(ValueError, match="denominator must have a value; got a tensor on meta"):
        function(**{**arguments, "denominator": torch.ones((), device="meta")})


@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm])
@pytest.mark.parametrize("eps", [math.inf, math.nan, -1e-9])
def test_eps(norm, eps):
    with pytest.raises(ValueError, match=f"eps must be finite and at least 0; got {eps}"):
        norm(rand(2, 4), eps=eps)


def test_a_shift_beyond_the_sequence():
    e, c, targets = rand(2, 3, 4), rand(5, 4), torch.zeros(2, 3, dtype=torch.long)
    assert F.cce_linear_cross_entropy(e, c, targets, shift=2).isfinite()
    for shift in (3, 4):
        with pytest.raises(ValueError, match=f"shift must be below targets' length 3; got {shift}"):
            F.cce_linear_cross_entropy(e, c, targets, shift=shift)


def test_memory_in_common():
    qkv = torch.zeros(2, 5, 8, 4)
    q, k = qkv[:, :, :4], qkv[:, :, 4:6]
    assert not share_memory(q, k) and first_shared([q, k, qkv[:, :, 6:]]) is None
    assert share_memory(q, qkv[:, :, 3:5]) and first_shared([k, q, qkv[:, :, 3:5]]) == (1, 2)
    assert not share_memory(qkv[..., ::2], qkv[..., 1::2]) and share_memory(qkv[..., ::2], qkv[..., ::3])
    assert share_memory(qkv.view(torch.int16)[..., 1:2], qkv[..., :1])
    assert not share_memory(qkv.view(torch.int16)[..., 2:4], qkv[..., :1])
    assert not share_memory(torch.zeros(3), torch.zeros(3)) and not share_memory(q[:0], q)
    assert lies_once(q) and lies_once(q.mT) and lies_once(torch.zeros(1).expand(1, 1))
    assert not lies_once(torch.zeros(3, 1).expand(3, 2)) and not lies_once(torch.zeros(9).as_strided((3, 3), (2, 1)))


@pytest.mark.parametrize("seed", range(30))
def test_memory_in_common_by_enumeration(seed):
    gen = torch.Generator().manual_seed(seed)

    def draw(*bounds: int) -> list[int]:
        return [int(torch.randint(n, (), generator=gen)) for n in bounds]

    base = torch.arange(4096)
    views = [base.as_strided([s + 1 for s in draw(4, 4, 4)], [s + 1 for s in draw(7, 40, 90)], draw(200)[0])
             for _ in range(2)]  # fmt: skip
    seen = [set(v.flatten().tolist()) for v in views]
    assert share_memory(*views) == bool(seen[0] & seen[1])
    assert all(len(s) == v.numel() for v, s in zip(views, seen) if lies_once(v))


def test_rope_in_place_needs_two_tensors_of_its_own():
    cos, sin = F.rope_tables(4, 8)
    qkv = rand(1, 3, 8, 4)
    with torch.no_grad():
        for q, k in ((qkv[:, :, :4], qkv[:, :, 3:]), (qkv, qkv.view(qkv.shape)), (qkv[:, :, :2], qkv[:, :, 1:2])):
            with pytest.raises(ValueError, match="inplace=True needs q and k to be two tensors"):
                F.rope(q, k, cos, sin, inplace=True)
        odd = rand(40).as_strided((1, 3, 2, 4), (0, 4, 2, 1))
        with pytest.raises(ValueError, match="none of them expanded or overlapping; got"):
            F.rope(odd, rand(1, 3, 1, 4), cos, sin, inplace=True)
        want = F.rope(qkv[:, :, :4], qkv[:, :, 4:6], cos, sin)
        got = F.rope(qkv[:, :, :4], qkv[:, :, 4:6], cos, sin, inplace=True)
        torch.testing.assert_close(got, want)


def test_cross_entropy_in_place_needs_logits_of_its_own():
    logits = rand(12).as_strided((3, 5), (3, 1)).requires_grad_()
    with pytest.raises(ValueError, match="cannot write over expanded or overlapping logits"):
        F.cross_entropy(logits, ids, inplace=True)


def test_adam_needs_tensors_of_their_own():
    def call(**changed):
        return F.adam_step(**{**CALLS[F.adam_step], **changed})

    wide = torch.zeros(1).expand(3)
    for changed in ({"params": [wide]}, {"exp_avgs": [wide]}, {"exp_avg_sqs": [wide]}):
        with pytest.raises(ValueError, match="neither expanded nor overlapping; got"):
            call(**changed)
    shared = rand(3)
    with pytest.raises(ValueError, match=r"params\[0\] and exp_avgs\[0\] must not have elements in common"):
        call(params=[shared], exp_avgs=[shared])
    with pytest.raises(ValueError, match="neither expanded nor overlapping"):
        Adam([torch.nn.Parameter(torch.zeros(1).expand(4))])
    flat = rand(6)
    with pytest.raises(ValueError, match="parameter 0 of group 0 and parameter 1 of group 0 must not have"):
        Adam([flat[:4], flat[2:]])
    Adam([flat[:3], flat[3:]])


def test_adam_looks_at_its_groups_again():
    p = torch.nn.Parameter(rand(3))
    p.grad = rand(3)
    optimizer, before = Adam([p], lr=0.1), p.detach().clone()
    for key, bad in (("lr", -0.1), ("lr", math.nan), ("lr", "0.1"), ("eps", -1.0), ("betas", (0.9, 1.0)),
                     ("weight_decay", -1.0)):  # fmt: skip
        kept, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], bad
        with pytest.raises((TypeError, ValueError), match=f"Adam: {key} must be"):
            optimizer.step()
        optimizer.param_groups[0][key] = kept
        assert torch.equal(p, before) and not optimizer.state
    optimizer.step()
    assert not torch.equal(p, before)


@pytest.mark.parametrize("name,value", [("absmax1", torch.ones(3)), ("absmax2", None), ("absmax1", "x")])
def test_adam_refuses_scales_that_do_not_fit_the_codes(name, value):
    p = torch.nn.Parameter(rand(5000))
    p.grad = rand(5000)
    optimizer = Adam([p], state="paged-8bit")
    optimizer.step()
    state, before = optimizer.state_dict(), optimizer.state_dict()
    state["state"][0][name] = value
    with pytest.raises(ValueError, match=rf"{name} of parameter 0 must be floating \[20\], one a block of 256 values"):
        optimizer.load_state_dict(state)
    for key, kept in before["state"][0].items():
        assert torch.equal(optimizer.state_dict()["state"][0][key], kept)


def test_rope_scalings_are_numbers():
    for bad in ("8", True, math.nan, -1.0):
        with pytest.raises((TypeError, ValueError), match="rope_tables: factor must be"):
            F.rope_tables(8, 16, scaling={"rope_type": "linear", "factor": bad})


def test_explain():
    for bad in ("gpu", "cuda:0", 0):
        with pytest.raises(ValueError, match="explain: device must be one of cpu, cuda, mps, xla, or None; got"):
            explain(bad)
    for dtype in (torch.int8, torch.float8_e4m3fn, "float32"):
        with pytest.raises(ValueError, match="explain: dtype must be float16, bfloat16, float32 or float64; got"):
            explain("cpu", dtype)
    paths = {row["op"]: row["implementation"] for row in explain("cpu")}
    assert paths["rope"] == "riftco.kernels.rope.cpu:forward" and paths["rope_"] == "riftco.kernels.rope.cpu:inplace"
    assert {row["implementation"] for row in explain("cpu", torch.float64) if row["op"] == "rope"} == {
        "riftco.kernels.rope.spec:forward"
    }


def test_modules_name_the_layer_s_arguments():
    with pytest.raises(ValueError, match="x must be floating"):
        NF4Linear(32, 4)(rand(3, 32).to(torch.float8_e4m3fn))
