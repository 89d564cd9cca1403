"""The sliced head by the signatures of PyTorch, Liger and cut-cross-entropy, and through modules."""

import pytest
import torch
import torch.nn.functional as F
from test_linear_cross_entropy import grads, make

from riftco import nn
from riftco.functional import (
    cce_linear_cross_entropy,
    liger_fused_linear_cross_entropy,
    lora_linear,
    quantize_nf4,
    sliced_head_loss,
    torch_linear_cross_entropy,
)


def plain(x, head, y, bias=None, **options):
    return F.cross_entropy(F.linear(x, head, bias), y, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torch(reduction):
    x, weight, y = make(9)
    y[2] = -100
    bias, w = torch.randn(33), torch.rand(33)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    more = dict(linear_bias=bias, weight=w, reduction=reduction, label_smoothing=0.1)
    choices = [None]
    if hasattr(F, "linear_cross_entropy"):
        want = F.linear_cross_entropy(x, weight, y, **more)
        choices.append(torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, acc_dtype=torch.float32))
    else:
        want = plain(x, weight, y, bias, weight=w, reduction=reduction, label_smoothing=0.1)
    for options in choices:
        got = torch_linear_cross_entropy(x, weight, y, **more, options=options)
        torch.testing.assert_close(got, want)
        for a, b in zip(grads(got.sum(), *leaves), grads(want.sum(), *leaves, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="class probabilities"):
        torch_linear_cross_entropy(x, weight, torch.rand(9, 33))
    with pytest.raises(ValueError, match=r"must be \[classes, in_features\]; got torch.float32 \(33, 2, 8\)"):
        torch_linear_cross_entropy(x, weight[:, None].expand(33, 2, 8), y)


def test_torch_module():
    w = torch.rand(33)
    ours = nn.LinearCrossEntropyLoss(8, 33, bias=True, weight=w, label_smoothing=0.2, ignore_index=4)
    x, _, y = make(11)
    y[1] = 4
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        theirs = torch.nn.LinearCrossEntropyLoss(8, 33, bias=True, weight=w, label_smoothing=0.2, ignore_index=4)
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x, y), theirs(x, y))
    z = F.linear(x, ours.linear.weight, ours.linear.bias)
    torch.testing.assert_close(ours(x, y), F.cross_entropy(z, y, weight=w, label_smoothing=0.2, ignore_index=4))
    with pytest.raises(ValueError, match="out_features"):
        nn.LinearCrossEntropyLoss(8, 33, out_features=(2,))


def test_liger():
    """The functional form takes the input first, the module the weight first."""
    x, weight, y = make(12)
    y[3] = -100
    w = torch.rand(33)
    z = 5 * torch.tanh(F.linear(x, weight) / 5)
    lse = z.logsumexp(-1)
    want_z = 0.1 * lse[y >= 0].square().sum()
    got = liger_fused_linear_cross_entropy(
        x, weight, y, lse_square_scale=0.1, softcap=5.0, return_z_loss=True, return_token_accuracy=True,
        return_predicted_tokens=True,
    )  # fmt: skip
    torch.testing.assert_close(got.z_loss, want_z / 11)
    torch.testing.assert_close(got.loss, F.cross_entropy(z, y) + want_z / 11)
    assert torch.equal(got.predicted_tokens, torch.where(y >= 0, z.argmax(-1), -1))
    assert got.token_accuracy == (z.argmax(-1) == y)[y >= 0].float().mean()
    weighted = liger_fused_linear_cross_entropy(x, weight, y, None, w, lse_square_scale=0.1, return_z_loss=True)
    plain_lse = F.linear(x, weight).logsumexp(-1)[y >= 0]
    torch.testing.assert_close(weighted.z_loss, 0.1 * plain_lse.square().sum() / w[y[y >= 0]].sum())
    y[3] = 255  # no class, and what is ignored
    outside = liger_fused_linear_cross_entropy(x, weight, y, None, w, 255, lse_square_scale=0.1, return_z_loss=True)
    assert torch.equal(outside.loss, weighted.loss) and torch.equal(outside.z_loss, weighted.z_loss)
    y[3] = -100
    module = nn.LigerFusedLinearCrossEntropyLoss(ce_weight=w, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(
        module(weight, x, y), plain(x, weight, y, weight=w, label_smoothing=0.1, reduction="sum")
    )
    scaled = liger_fused_linear_cross_entropy(x, weight, y, use_token_scaling=True, reduction="none")
    rows = plain(x, weight, y, reduction="none")
    torch.testing.assert_close(scaled, rows * torch.where(y >= 0, (-rows).exp(), 0.0))


def test_cut_cross_entropy():
    x, weight, y = make(3, 7)
    bias = torch.randn(33)
    z = F.linear(x, weight, bias)
    for shift in (0, 1, True, 2):
        s = int(shift)
        want = F.cross_entropy(z[:, : 7 - s].flatten(0, 1), y[:, s:].flatten(), reduction="none").view(3, 7 - s)
        rows, lse = cce_linear_cross_entropy(x, weight, y, bias, reduction="none", shift=shift, return_lse=True)
        torch.testing.assert_close(rows, want)
        torch.testing.assert_close(lse, z[:, : 7 - s].logsumexp(-1))
        module = nn.LinearCrossEntropy(shift=shift, filter_eps=None, accum_c_fp32=True, impl="cce_exact")
        torch.testing.assert_close(module(x, weight, y, bias), want.mean())
    for options, text in (
        (dict(impl="fast"), "'fast'"),
        (dict(vocab_parallel_options=1), "vocab_parallel_options"),
        (dict(shift=-1), "shift"),
    ):
        with pytest.raises(ValueError, match=text):
            cce_linear_cross_entropy(x, weight, y, **options)


def test_heads_that_are_modules():
    x, _, y = make(10, C=64)
    linear = torch.nn.Linear(64, 33)
    torch.testing.assert_close(sliced_head_loss(x, linear, y), F.cross_entropy(linear(x), y))
    adapted = nn.LoRALinear(linear, 4, 8.0)
    torch.nn.init.normal_(adapted.lora_B.weight)
    want = F.cross_entropy(adapted(x), y)
    got = sliced_head_loss(x, adapted, y, slice_bytes=2000)
    torch.testing.assert_close(got, want)
    parts = [adapted.lora_A.weight, adapted.lora_B.weight]
    for a, b in zip(grads(got, *parts), grads(want, *parts), strict=True):
        torch.testing.assert_close(a, b)
    quantised = nn.NF4Linear(64, 33, bias=False)
    quantised.weight = quantize_nf4(torch.randn(33, 64))
    on_nf4 = nn.LoRALinear(quantised, 4, 8.0)
    torch.nn.init.normal_(on_nf4.lora_B.weight)
    want = F.cross_entropy(
        lora_linear(x, quantised.weight, on_nf4.lora_A.weight, on_nf4.lora_B.weight, scale=on_nf4.scale), y
    )
    torch.testing.assert_close(sliced_head_loss(x, on_nf4, y), want)


def test_heads_that_are_not_linear_in_their_rows():
    x, _, y = make(10)
    linear = torch.nn.Linear(8, 33)
    for head in (torch.nn.Sequential(linear), torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 33))):
        with pytest.raises(ValueError, match=r"the head must be a torch\.nn\.Linear, .* got "):
            sliced_head_loss(x, head, y)
    hook = linear.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"):
        sliced_head_loss(x, linear, y)
    hook.remove()
    dropping = nn.LoRALinear(linear, 2, 4.0, dropout=0.1)
    with pytest.raises(ValueError, match="dropout"):
        sliced_head_loss(x, dropping, y)
    sliced_head_loss(x, dropping.eval(), y)
