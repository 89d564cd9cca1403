"""Every op's public function."""

from .kernels._recompute import last_product, recomputed, replay
from .kernels.adam.op import adam_step
from .kernels.attention import (
    AuxRequest,
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
    varlen_attn,
)
from .kernels.attention.probe import attention_backward
from .kernels.cached_attention.cache import Cache, CacheLayer
from .kernels.cached_attention.decode import decode_with_cache
from .kernels.cached_attention.op import attention_with_cache
from .kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_time_range,
    per_token_logprobs,
    topk_cross_entropy,
    torch_cross_entropy,
)
from .kernels.embedding.op import embedding, gather_rows, scatter_rows
from .kernels.gguf_linear.op import dequantize_gguf, gguf_linear
from .kernels.gguf_linear.weight import GGUFWeight
from .kernels.layer_norm.op import layer_norm
from .kernels.linear_cross_entropy import (
    cce_linear_cross_entropy,
    describe_head,
    liger_fused_linear_cross_entropy,
    linear_cross_entropy,
    sliced_head_loss,
    torch_linear_cross_entropy,
)
from .kernels.lora_linear.op import lora_linear, lora_linear_group
from .kernels.nf4.op import dequantize_nf4, nf4_linear
from .kernels.nf4.quantize import quantize_nf4
from .kernels.nf4.weight import NF4Weight
from .kernels.rms_norm.op import rms_norm
from .kernels.rope.op import rope
from .kernels.rope.tables import rope_frequencies, rope_tables
from .kernels.swiglu.op import geglu, swiglu

__all__ = [
    "AuxRequest",
    "Cache",
    "CacheLayer",
    "GGUFWeight",
    "NF4Weight",
    "adam_step",
    "attention",
    "attention_backward",
    "attention_with_cache",
    "cce_linear_cross_entropy",
    "cross_entropy",
    "cross_entropy_time_range",
    "decode_with_cache",
    "dequantize_gguf",
    "dequantize_nf4",
    "describe_head",
    "embedding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "gather_rows",
    "geglu",
    "gguf_linear",
    "last_product",
    "layer_norm",
    "liger_fused_linear_cross_entropy",
    "linear_cross_entropy",
    "lora_linear",
    "lora_linear_group",
    "nf4_linear",
    "per_token_logprobs",
    "quantize_nf4",
    "recomputed",
    "replay",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_tables",
    "scaled_dot_product_attention",
    "scatter_rows",
    "sliced_head_loss",
    "swiglu",
    "topk_cross_entropy",
    "torch_cross_entropy",
    "torch_linear_cross_entropy",
    "varlen_attn",
]
