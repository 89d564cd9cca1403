"""Decoders of the Llama family: configs, files, tokenizers, generation."""

from .config import DecoderConfig
from .decoder import Decoder
from .digest import base_digest
from .errors import ModelError
from .generation import generate, generate_tokens
from .installed import smollm2_path
from .kv_cache import KVCache
from .load import load_model, load_tokenizer
from .save import save_hf
from .save_gguf import save_gguf
from .tokenizer import Text, Tokenizer

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "ModelError",
    "Text",
    "Tokenizer",
    "base_digest",
    "generate",
    "generate_tokens",
    "load_model",
    "load_tokenizer",
    "save_gguf",
    "save_hf",
    "smollm2_path",
]
