"""nn.MultiheadAttention beside torch.nn.MultiheadAttention: outputs, weights, gradients, state, refusals."""

import copy
import inspect
import itertools

import pytest
import torch

from riftco import nn

B, T, S, E, H = 3, 5, 7, 12, 3


def pair(seed=0, **options):
    """PyTorch's module and ours with the same parameters, none of them zero."""
    options = {"embed_dim": E, "num_heads": H, "dtype": torch.float64, **options}
    torch.manual_seed(seed)
    theirs, ours = torch.nn.MultiheadAttention(**options), nn.MultiheadAttention(**options)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def compare(theirs, ours, *tensors, **options):
    """`tensors` may name one tensor twice: self-attention is found by identity. Floating masks get gradients too."""
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        leaves = {id(t): t.clone().requires_grad_() for t in tensors}
        inputs = [leaves[id(t)] for t in tensors]
        given = {
            n: v.clone().requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for n, v in options.items()
        }
        out, weights = module(*inputs, **given)
        parts = [out] if weights is None else [out, weights]
        loss = sum((p * torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)).sum() for p in parts)
        loss.backward()
        named = {f"result {n}": p.detach() for n, p in enumerate(parts)}
        named |= {f"input {n}": t.grad for n, t in enumerate(inputs)}
        named |= {n: t.grad for n, t in given.items() if isinstance(t, torch.Tensor) and t.requires_grad}
        named |= {n: p.grad for n, p in module.named_parameters()}
        results.append(named)
    assert results[0].keys() == results[1].keys()
    for name, want in results[0].items():
        got = results[1][name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}")


def inputs(batch_first=False, batched=True, kdim=E, vdim=E):
    shapes = (T, E), (S, kdim), (S, vdim)
    if not batched:
        return [torch.randn(s, dtype=torch.float64) for s in shapes]
    return [torch.randn((B, n, c) if batch_first else (n, B, c), dtype=torch.float64) for n, c in shapes]


def padding(floating, batched=True):
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, 4:] = mask[2, 6:] = True
    mask = mask if batched else mask[0]
    return torch.where(mask, -torch.inf, torch.randn(mask.shape, dtype=torch.float64)) if floating else mask


def attn_mask(kind, heads=B * H):
    shape = (T, S) if kind.startswith("2d") else (heads, T, S)
    mask = torch.rand(shape) > 0.7
    mask[..., 0] = False  # every row sees a key: PyTorch has NaN in its weights otherwise
    return torch.randn(shape, dtype=torch.float64).masked_fill(mask, -torch.inf) if kind.endswith("float") else mask


CONSTRUCTED = [
    {},
    {"bias": False, "batch_first": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 4, "vdim": 6},
    {"kdim": 4, "vdim": 6, "bias": False, "batch_first": True},
    {"kdim": 8},
]
MASKS = [
    (None, None),
    (False, None),
    (True, None),
    (None, "2d"),
    (None, "3d"),
    (None, "2d float"),
    (False, "2d"),
    (False, "3d"),
    (True, "3d float"),
]


@pytest.mark.parametrize("options", CONSTRUCTED, ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_forward_and_gradients_are_pytorchs(options, need_weights):
    theirs, ours = pair(**options)
    x = inputs(options.get("batch_first", False), True, options.get("kdim", E), options.get("vdim", E))
    for key_padding, mask in MASKS:
        kwargs = {
            "key_padding_mask": None if key_padding is None else padding(key_padding),
            "attn_mask": None if mask is None else attn_mask(mask),
            "need_weights": need_weights,
        }
        compare(theirs, ours, *x, **kwargs)
    if need_weights:
        compare(theirs, ours, *x, average_attn_weights=False)


@pytest.mark.parametrize("options", CONSTRUCTED[:5], ids=str)
def test_one_sequence(options):
    theirs, ours = pair(**options)
    x = inputs(batched=False, kdim=options.get("kdim", E), vdim=options.get("vdim", E))
    for need_weights, average in itertools.product((False, True), (False, True)):
        how = {"need_weights": need_weights, "average_attn_weights": average}
        compare(theirs, ours, *x, **how)
        compare(theirs, ours, *x, **how, key_padding_mask=padding(False, batched=False), attn_mask=attn_mask("2d"))
        compare(theirs, ours, *x, **how, attn_mask=attn_mask("3d float", heads=H))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_shared_inputs(batch_first, bias):
    """Self-attention and shared keys and values run fewer matmuls, with the same gradients."""
    theirs, ours = pair(batch_first=batch_first, bias=bias)
    q, k, v = inputs(batch_first)
    for tensors in ((q, q, q), (q, k, k), (q, q, q.clone()), (q, q.clone(), q), (q, k, v)):
        compare(theirs, ours, *tensors, need_weights=False)
        compare(theirs, ours, *tensors)


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}, {"batch_first": True}], ids=str)
def test_is_causal(options):
    theirs, ours = pair(**options)
    x = inputs(options.get("batch_first", False))[0]
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    pad = torch.zeros(B, T, dtype=torch.bool)
    pad[1, 3:] = True
    for need_weights in (False, True):
        compare(theirs, ours, x, x, x, attn_mask=mask, key_padding_mask=pad, is_causal=True, need_weights=need_weights)
    compare(theirs, ours, x, x, x, attn_mask=mask, is_causal=True)
    with_mask = ours(x, x, x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], with_mask)
    everything = torch.zeros_like(mask)  # a hint that is not so shows that the mask was not read
    believed = ours(x, x, x, attn_mask=everything, is_causal=True, need_weights=False)[0]
    assert torch.allclose(believed, with_mask) != bool(options.get("add_zero_attn"))


def test_rows_that_see_nothing_are_zero_and_poison_nothing():
    _, ours = pair(bias=False)
    q, k, v = (t.requires_grad_() for t in inputs())
    mask = padding(False)
    mask[1] = True
    for need_weights in (False, True):
        out, weights = ours(q, k, v, key_padding_mask=mask, need_weights=need_weights)
        assert (out[:, 1] - ours.out_proj.bias if ours.out_proj.bias is not None else out[:, 1]).abs().max() == 0
        assert weights is None or (weights[1] == 0).all()
        grads = torch.autograd.grad(out.square().sum(), (q, k, v, ours.in_proj_weight))
        assert all(g.isfinite().all() for g in grads) and (grads[0][:, 1] == 0).all()


def test_masks_of_two_kinds_mix():
    _, ours = pair()
    x = inputs()
    pad, mask = padding(False), attn_mask("2d float")
    as_float = torch.zeros(B, S, dtype=torch.float64).masked_fill(pad, -torch.inf)
    for need_weights in (False, True):
        a, b = (ours(*x, key_padding_mask=p, attn_mask=mask, need_weights=need_weights)[0] for p in (pad, as_float))
        torch.testing.assert_close(a, b)


def test_dropout_acts_in_training_only():
    theirs, ours = pair(dropout=0.5)
    x = inputs()
    for need_weights in (False, True):
        torch.manual_seed(1)
        a, weights = ours(*x, need_weights=need_weights)
        torch.manual_seed(1)
        assert torch.equal(a, ours(*x, need_weights=need_weights)[0])
        assert not torch.equal(a, ours(*x, need_weights=need_weights)[0])
        assert weights is None or (weights == 0).any()
    compare(theirs.eval(), ours.eval(), *x, need_weights=False)
    compare(theirs, ours, *x)


@pytest.mark.parametrize("options", CONSTRUCTED, ids=str)
def test_state_and_initial_values_are_pytorchs(options):
    torch.manual_seed(5)
    theirs = torch.nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(5)
    ours = nn.MultiheadAttention(E, H, **options)
    a, b = theirs.state_dict(), ours.state_dict()
    assert list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)
    changed = {n: t + 1 for n, t in b.items()}
    ours.load_state_dict(changed)
    theirs.load_state_dict(ours.state_dict())
    assert all(torch.equal(t, changed[n]) for n, t in theirs.state_dict().items())
    assert isinstance(ours, torch.nn.MultiheadAttention)
    assert torch.equal(copy.deepcopy(ours).out_proj.weight, ours.out_proj.weight)


def test_signatures_are_pytorchs():
    for name in ("__init__", "forward"):
        ours, theirs = (
            [(p.name, p.default, p.kind) for p in inspect.signature(getattr(c, name)).parameters.values()]
            for c in (nn.MultiheadAttention, torch.nn.MultiheadAttention)
        )
        assert ours == theirs


def test_inside_a_transformer_layer():
    """PyTorch's encoder and decoder layers with their attention replaced, padded and causal."""
    torch.manual_seed(0)
    x, memory = torch.randn(B, T, E, dtype=torch.float64), torch.randn(B, S, E, dtype=torch.float64)
    options = {"d_model": E, "nhead": H, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "dtype": x.dtype}
    pad = torch.zeros(B, T, dtype=torch.bool)
    pad[0, 3:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for make, args, kwargs in (
        (torch.nn.TransformerEncoderLayer, (x,), {"src_key_padding_mask": pad}),
        (torch.nn.TransformerEncoderLayer, (x,), {"src_mask": causal, "is_causal": True}),
        (torch.nn.TransformerDecoderLayer, (x, memory), {"tgt_mask": causal, "tgt_is_causal": True}),
    ):
        theirs = make(**options)
        ours = copy.deepcopy(theirs)
        for name in ("self_attn", "multihead_attn"):
            if hasattr(ours, name):
                module = nn.MultiheadAttention(E, H, batch_first=True, dtype=x.dtype)
                module.load_state_dict(getattr(ours, name).state_dict())
                setattr(ours, name, module)
        torch.testing.assert_close(ours(*args, **kwargs), theirs(*args, **kwargs))


def test_compile_and_autocast():
    _, ours = pair(add_zero_attn=True)
    x = inputs()
    for need_weights in (False, True):
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        got = compiled(*x, key_padding_mask=padding(False), need_weights=need_weights)
        want = ours(*x, key_padding_mask=padding(False), need_weights=need_weights)
        torch.testing.assert_close(got[0], want[0])
    theirs, ours = (m.float() for m in pair(add_bias_kv=True))
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (False, True):
            a, b = (m(*[t.float() for t in x], need_weights=need_weights)[0] for m in (theirs, ours))
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)


def test_float32_kernels():
    theirs, ours = (m.float() for m in pair(batch_first=True))
    x = [t.float() for t in inputs(True)]
    compare(theirs, ours, *x, need_weights=False, key_padding_mask=padding(False))
    compare(theirs, ours, *x, need_weights=False, attn_mask=attn_mask("3d float").float())


def test_refusals():
    _, ours = pair()
    q, k, v = inputs()
    for text, change in [
        ("2 or all 3 dimensions", {"query": q[0]}),
        ("last dimensions", {"query": q[..., :4]}),
        ("batch sizes or lengths", {"value": v[:3]}),
        ("batch sizes or lengths", {"query": q[:, :2]}),
        ("key_padding_mask must be bool or floating", {"key_padding_mask": torch.zeros(B, S, dtype=torch.uint8)}),
        ("key_padding_mask must be", {"key_padding_mask": torch.zeros(S, B)}),
        ("attn_mask must be", {"attn_mask": torch.zeros(S, T)}),
        ("attn_mask must be", {"attn_mask": torch.zeros(B, T, S)}),
        ("give attn_mask", {"is_causal": True}),
        ("nested", {"query": torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)}),
    ]:
        with pytest.raises(ValueError, match=text):
            ours(**{"query": q, "key": k, "value": v, **change})
