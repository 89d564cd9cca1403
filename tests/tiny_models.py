"""Tiny random models of each family, made by transformers, and GGUF files made by the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from families import FAMILIES, SIZES
from torch import Tensor


def hf_config(family: str, **changes):
    from transformers import AutoConfig

    kind, options = FAMILIES[family]
    return AutoConfig.for_model(kind, **{**SIZES, **options, **changes})


def hf_model(family: str, seed: int = 0, **changes):
    """A transformers model with weights large enough that every part shows in the logits."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(family, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=0.15)
            else:
                p.add_(torch.randn_like(p) * 0.2) if "norm" in name else p.normal_(std=0.3)
    return model


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_ARCH = {"gemma3_text": "gemma3", "mistral": "llama"}


def gguf_model(family: str, **changes):
    """One that a GGUF file can hold: no key of it says what Gemma divides scores by, which is then the head size, or
    which of SmolLM3's layers do not rotate, which is then every fourth one."""
    if family == "smollm3":
        changes = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], **changes}
    if family.startswith("gemma"):
        changes.setdefault("query_pre_attn_scalar", 32)
    return hf_model(family, **changes)


def rounded(model, kind: str, everywhere: bool = False):
    """`model` with the weights that its file of `matrix_type=kind` stands for."""
    import gguf

    stored = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and (everywhere or name.startswith("model.layers.")):
                p.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(p.detach().numpy(), stored), stored).copy()))
    return model


def write_gguf(
    path: Path, model, *, matrix_type: str = "F32", arch: str | None = None, rope_freqs=None, everywhere=False,
    **metadata,
):  # fmt: skip
    """`model` (of transformers) as llama.cpp writes it: matrices of the blocks in `matrix_type`, all else in F32;
    `everywhere`: embedding and head in it, too."""
    import gguf

    config = model.config
    arch = arch or GGUF_ARCH.get(config.model_type, config.model_type)
    kind = gguf.GGMLQuantizationType[matrix_type]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rotation(writer, config, head_dim, rope_freqs)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":  # the tiny one has another pattern than the models that llama.cpp knows
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    for key, value in metadata.items():
        add(writer, key.replace("__", "."), value)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in ("llama", "mistral", "smollm3") and ".q_proj." in name:
            value = permute(value, config.num_attention_heads)
        if arch in ("llama", "mistral", "smollm3") and ".k_proj." in name:
            value = permute(value, config.num_key_value_heads)
        values = value.float().numpy()
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        if value.dim() == 2 and (everywhere or name.startswith("model.layers.")):
            writer.add_tensor(gguf_name(name, arch), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, arch), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotation(writer, config, head_dim: int, rope_freqs) -> None:
    """The rotation's metadata and divisors."""
    import gguf

    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        for name in ("short", "long"):
            factors = np.asarray(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if kind == "llama3" and rope_freqs is None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        rope_freqs = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim) / scaled
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))


def add(writer, key: str, value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_name(name: str, arch: str = "llama") -> str:
    names = GEMMA_NAMES if arch.startswith("gemma") else GGUF_NAMES
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, inner = stem.split(".", 3)
        return f"blk.{index}.{names[inner]}.{leaf}"
    return f"{names[stem]}.{leaf}"


def permute(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's row order of q and k: halves of a head become neighbouring pairs."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def byte_level_vocabulary(merges: list[str], control: list[str]) -> dict:
    """GGUF metadata of a byte-level BPE tokenizer: control tokens, 256 bytes, then what the merges make."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*control, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "tokenizer__ggml__merges": merges,
    }
