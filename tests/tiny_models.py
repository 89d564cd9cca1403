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
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, model, *, matrix_type: str = "F32", arch: str | None = None, rope_freqs=None, **metadata):
    """`model` (of transformers) as llama.cpp writes it: matrices of the blocks in `matrix_type`, all else in F32."""
    import gguf

    config = model.config
    arch = arch or config.model_type
    kind = gguf.GGMLQuantizationType[matrix_type]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in metadata.items():
        add(writer, key.replace("__", "."), value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in ("llama", "mistral") and ".q_proj." in name:
            value = permute(value, config.num_attention_heads)
        if arch in ("llama", "mistral") and ".k_proj." in name:
            value = permute(value, config.num_key_value_heads)
        values = value.float().numpy()
        if value.dim() == 2 and name.startswith("model.layers."):
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, inner = stem.split(".", 3)
        return f"blk.{index}.{GGUF_NAMES[inner]}.{leaf}"
    return f"{GGUF_NAMES[stem]}.{leaf}"


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
