"""A Hugging Face folder's tokenizer as GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ModelError
from .gguf_tokenizer import CONTROL, CUTS, USER_DEFINED
from .safetensors_folder import SafetensorsFolder
from .tokenizer import Tokenizer

NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6  # of tokenizer.ggml.token_type, beside CONTROL and USER_DEFINED
_ALIASES = ("llama3", "llama-v3", "smaug-bpe", "deepseek-r1-qwen")  # other names for cuts that have one


def tokenizer_metadata(source: SafetensorsFolder, tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys "tokenizer.*" of a GGUF file for the model and tokenizer of a folder.

    Raises:
        ModelError: a tokenizer whose way of cutting text llama.cpp has no name for here.
    """
    file = source.path
    backend = json.loads(tokenizer.hf.backend_tokenizer.to_str())
    model = backend.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(f"{file}: a tokenizer of type {model.get('type')!r} is not supported; accepted: BPE")
    tokens, kinds = _tokens(backend, source.config.vocab_size)
    if model.get("byte_fallback"):
        made = _sentencepiece(backend, tokens, kinds)
    else:
        made = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _cut(file, backend)}
        made["tokenizer.ggml.merges"] = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", ())]
    made |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    plain = tokenizer.encode("a")
    made["tokenizer.ggml.add_bos_token"] = tokenizer.encode("a", add_special_tokens=True) != plain and (
        tokenizer.bos_id is not None and tokenizer.encode("a", add_special_tokens=True)[0] == tokenizer.bos_id
    )
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id}
    made |= {f"tokenizer.ggml.{k}_token_id": int(v) for k, v in ids.items() if v is not None}
    if tokenizer.has_chat_template and isinstance(tokenizer.hf.chat_template, str):
        made["tokenizer.chat_template"] = tokenizer.hf.chat_template
    return made


def _tokens(backend: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """All tokens in order, and their kinds; ids that no token has are filled up, as llama.cpp's converter does."""
    by_id = {i: t for t, i in backend["model"]["vocab"].items()}
    added = {a["id"]: a for a in backend.get("added_tokens", ())}
    tokens, kinds = [], []
    for i in range(size):
        if i in added:
            tokens.append(added[i]["content"])
            kinds.append(CONTROL if added[i]["special"] else USER_DEFINED)
        else:
            tokens.append(by_id.get(i, f"[PAD{i}]"))
            kinds.append(NORMAL if i in by_id else UNUSED)
    return tokens, kinds


def _cut(file: Path, backend: Mapping[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer cuts text before merging."""
    steps = backend.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if backend.get("normalizer") not in (None, {"type": "NFC"}):
        raise ModelError(f"{file}: its tokenizer's normalizer is not supported; accepted: none, NFC")
    kinds = [s.get("type") for s in steps]
    found: Any = ""
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        found = None
    elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        found = "digits:"
    elif kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        found = steps[0]["pattern"].get("Regex", "")
    for name, cut in CUTS.items():
        if found == cut and name not in _ALIASES:
            return name
    raise ModelError(
        f"{file}: llama.cpp's name for how its tokenizer cuts text is not known here; accepted: {', '.join(CUTS)}"
    )


def _sentencepiece(backend: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """SentencePiece's BPE: a token's score is minus the rank of the first merge that makes it; bytes are marked."""
    model = backend["model"]
    rank: dict[str, int] = {}
    for place, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        rank.setdefault(left + right, place)
    worst = float(len(rank) + 1)
    for i, token in enumerate(tokens):
        if token == model.get("unk_token"):
            kinds[i] = UNKNOWN
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[i] = BYTE
    steps = backend.get("normalizer") or {}
    steps = steps.get("normalizers", [steps])
    pre = backend.get("pre_tokenizer") or {}
    prefix = any(s.get("type") == "Prepend" for s in steps) or pre.get("prepend_scheme") in ("always", "first")
    made: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [-float(rank.get(t, worst)) for t in tokens],
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    if model.get("unk_token") in tokens:
        made["tokenizer.ggml.unknown_token_id"] = tokens.index(model["unk_token"])
    return made
