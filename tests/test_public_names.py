"""Names that programs were written against: new ones are added, none changes its place, its default or its meaning.

What is listed here was published. A new loss, reduction or option is appended and listed below; a line is never edited.
"""

import inspect
import math

import pytest
import torch

import riftco.functional as F
from riftco.train import losses

# name -> positional arguments in their order, then options with their defaults
LOSSES = {
    "cross_entropy": (
        ["logits", "target", "weight"],
        dict(
            weight=None, row_weight=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None,
            logit_scale=1.0, reduction="mean", denominator=None, inplace=False, return_lse=False, return_metrics=False,
            impl=None,
        ),
    ),
    "cross_entropy_time_range": (["logits", "target", "start", "end"], {}),
    "topk_cross_entropy": (
        ["logits", "ids", "weights"],
        dict(row_weight=None, softcap=None, logit_scale=1.0, reduction="mean", denominator=None, impl=None),
    ),
    "per_token_logprobs": (["logits", "target"], dict(temperature=1.0, ignore_index=-100, impl=None)),
    "linear_cross_entropy": (
        ["x", "weight", "target", "bias"],
        dict(
            bias=None, row_weight=None, class_weight=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
            softcap=None, logit_scale=1.0, reduction="mean", denominator=None, lora=None, slice_bytes=None,
            accum_dtype=torch.float32, n_labelled=None, shift=False, topk=None, checkpoint=False, return_lse=False,
            return_metrics=False, impl=None,
        ),
    ),
    "sliced_head_loss": (["x", "head", "target"], {}),
    "dpo_loss": (["logits", "target", "reference"], dict(beta=0.1, label_smoothing=0.0)),
    "grpo_loss": (
        ["logits", "target", "advantages"],
        dict(old=None, reference=None, beta=0.0, clip=(0.2, 0.2), temperature=1.0),
    ),
}  # fmt: skip
FUNCTIONS = {
    "adam_step", "attention", "attention_backward", "attention_with_cache", "cce_linear_cross_entropy", "cross_entropy",
    "cross_entropy_time_range", "decode_with_cache", "dequantize_gguf", "dequantize_nf4", "describe_head", "embedding",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "gather_rows", "geglu", "gguf_linear", "layer_norm",
    "liger_fused_linear_cross_entropy", "linear_cross_entropy", "lora_linear", "lora_linear_group", "nf4_linear",
    "last_product", "per_token_logprobs", "quantize_nf4", "recomputed", "replay",
    "rms_norm", "rope", "rope_frequencies", "rope_tables",
    "scaled_dot_product_attention", "scatter_rows", "sliced_head_loss", "swiglu", "topk_cross_entropy",
    "torch_cross_entropy", "torch_linear_cross_entropy", "varlen_attn",
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_its_arguments(name):
    places, options = LOSSES[name]
    given = inspect.signature(getattr(F, name, None) or getattr(losses, name)).parameters
    by_place = [p for p in given.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in by_place][: len(places)] == places
    assert all(p.default is not p.empty for p in by_place[len(places) :]), "what is new may be left out"
    for option, default in options.items():
        assert given[option].default == default, option
    assert all(p.default is not p.empty for p in given.values() if p.kind is p.KEYWORD_ONLY)


def test_no_function_is_gone():
    assert set(F.__all__) >= FUNCTIONS
    assert all(callable(getattr(F, name)) for name in FUNCTIONS)


@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy", "topk_cross_entropy"])
def test_a_reduction_keeps_its_meaning(loss):
    """By its name alone: mean over what carries a label, sum, none; another is refused with the list."""
    x, y = torch.tensor([[0.0, 1.0], [2.0, 0.0], [5.0, 5.0]]), torch.tensor([1, 1, -1])
    rows = [math.log1p(math.exp(-1)), math.log1p(math.exp(2))]

    def call(reduction):
        if loss == "linear_cross_entropy":
            return F.linear_cross_entropy(x, torch.eye(2), y, reduction=reduction)
        if loss == "topk_cross_entropy":
            return F.topk_cross_entropy(x, y[:, None], torch.ones(3, 1), reduction=reduction)
        return F.cross_entropy(x, y, reduction=reduction)

    assert call("none").tolist() == pytest.approx([*rows, 0.0])
    assert float(call("sum")) == pytest.approx(sum(rows)) and float(call("mean")) == pytest.approx(sum(rows) / 2)
    with pytest.raises(ValueError, match=r"mean.*sum.*none"):
        call("batchmean")
