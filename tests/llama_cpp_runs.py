"""What llama.cpp itself computes of a file, where llama-cpp-python is installed: logits, and greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import byte_level_vocabulary

VOCABULARY = 260  # of this tokenizer: three control tokens, 256 bytes, one merge
TOKENIZER = {
    **{k.replace("__", "."): v for k, v in byte_level_vocabulary(["a b"], ["<|end|>", "<|bos|>", "<|eos|>"]).items()},
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
FLOAT32 = 0  # GGML's number, for the cache


def opened(path, lora=None):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    return llama_cpp.Llama(
        str(path), lora_path=None if lora is None else str(lora), n_ctx=64, n_gpu_layers=0, n_threads=1,
        logits_all=True, type_k=FLOAT32, type_v=FLOAT32, flash_attn=False, verbose=False,
    )  # fmt: skip


def logits(path, ids: list[int], lora=None) -> torch.Tensor:
    model = opened(path, lora)
    model.eval(ids)
    return torch.from_numpy(np.array(model.scores[: len(ids)]))


def greedy(path, ids: list[int], count: int, lora=None) -> list[int]:
    model, made = opened(path, lora), []
    for token in model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
        made.append(token)
        if len(made) == count:
            return made
    return made
