"""Every drop-in module; and what a call of a module does, for those who go round it."""

from ..kernels._calls import hooked, own_call, plain_call
from ..kernels.attention.module import Attention
from ..kernels.attention.multihead import MultiheadAttention
from ..kernels.cached_attention.module import CachedAttention
from ..kernels.cross_entropy.module import CrossEntropyLoss, LigerCrossEntropyLoss
from ..kernels.embedding.module import Embedding, LoRAEmbedding, TokensHead, TrainableTokens
from ..kernels.gguf_linear.module import GGUFEmbedding, GGUFLinear
from ..kernels.layer_norm.module import LayerNorm
from ..kernels.linear_cross_entropy.module import (
    LigerFusedLinearCrossEntropyLoss,
    LinearCrossEntropy,
    LinearCrossEntropyLoss,
)
from ..kernels.lora_linear.module import LoRALinear, TiedLoRALinear, linear_group
from ..kernels.nf4.module import NF4Linear
from ..kernels.nf4.sharded import NF4ParameterLinear
from ..kernels.rms_norm.module import RMSNorm
from ..kernels.rope.module import RotaryEmbedding
from ..kernels.swiglu.module import SwiGLU

__all__ = [
    "Attention",
    "CachedAttention",
    "CrossEntropyLoss",
    "Embedding",
    "LayerNorm",
    "GGUFEmbedding",
    "GGUFLinear",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LinearCrossEntropy",
    "LinearCrossEntropyLoss",
    "LoRAEmbedding",
    "LoRALinear",
    "MultiheadAttention",
    "NF4Linear",
    "NF4ParameterLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "TiedLoRALinear",
    "TokensHead",
    "TrainableTokens",
    "hooked",
    "linear_group",
    "own_call",
    "plain_call",
]
