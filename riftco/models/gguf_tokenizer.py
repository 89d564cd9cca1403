"""The tokenizer that a GGUF file's metadata describes, as a transformers fast tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ModelError, package

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how text is cut before merging: a regular expression, or None for GPT-2's own; a leading
# "digits:" cuts every digit off first. A wrong cut gives other tokens without any error, so unknown names are refused.
CUTS = {
    "gpt-2": None,
    "smollm": "digits:",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "deepseek-r1-qwen": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def convert(path: Path, metadata: Mapping[str, Any]) -> Any:
    """metadata -> a transformers tokenizer with special tokens and chat template."""
    package("tokenizers")
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path}: no tokenizer in its metadata (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        backend = _byte_level(path, metadata, tokens)
    elif kind == "llama":
        backend = _sentencepiece(path, metadata, tokens)
    else:
        raise ModelError(f"{path}: tokenizer model {kind!r} is not supported; accepted: gpt2, llama")
    _add_marked(backend, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    _add_borders(backend, metadata, tokens, sentencepiece=kind == "llama")
    named = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    special = {name: _token(metadata, tokens, key) for name, key in named.items()}
    return package("transformers").PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{k: v for k, v in special.items() if v is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.get(f"{metadata.get('general.architecture')}.context_length", int(1e30)),
    )


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Byte-level BPE, as GPT-2 has it, with the cut that `tokenizer.ggml.pre` names."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    if name not in CUTS:
        raise ModelError(f"{path}: tokenizer.ggml.pre {name!r} is not supported; accepted: {', '.join(CUTS)}")
    cut = CUTS[name]
    ignore_merges = cut == _LLAMA3  # these vocabularies hold whole words that no sequence of merges reaches
    merges = _merges(path, metadata)
    try:
        model = models.BPE(_vocabulary(tokens), merges, ignore_merges=ignore_merges)
    except Exception as why:  # what tokenizers raises, bare, for a merge of tokens that do not exist
        raise ModelError(f"{path}: tokenizer.ggml.merges do not fit the tokens ({why})") from why
    out = Tokenizer(model)
    if cut is None or cut == "digits:":
        steps: list = [pre_tokenizers.Digits(individual_digits=True)] if cut else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        steps = [
            pre_tokenizers.Split(Regex(cut), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    out.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    out.decoder = decoders.ByteLevel()
    return out


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """SentencePiece BPE: pairs merge in the order of the scores of what they make; unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.scores must have an entry for each of {len(tokens)} tokens")
    unknown = _token(metadata, tokens, "unknown_token_id")
    model = models.BPE(
        _vocabulary(tokens), merges_from_scores(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    out = Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    out.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    out.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return out


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two tokens, the best-scored token first, then by the ids of its parts."""
    ids = _vocabulary(tokens)
    merges = []
    for token, score in zip(tokens, scores):
        for i in range(1, len(token)):
            left, right = ids.get(token[:i]), ids.get(token[i:])
            if left is not None and right is not None:
                merges.append((-score, left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _merges(path: Path, metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = [tuple(m.split(" ")) for m in metadata.get("tokenizer.ggml.merges", ())]
    if any(len(m) != 2 for m in merges):
        raise ModelError(f"{path}: tokenizer.ggml.merges must list pairs of tokens")
    return merges


def _token(metadata: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}")
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _add_marked(backend: Any, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special; user-defined ones are matched whole but are text."""
    from tokenizers import AddedToken

    marked = [(t, k) for t, k in zip(tokens, kinds) if k in (CONTROL, USER_DEFINED)]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in marked if k == USER_DEFINED])


def _add_borders(backend: Any, metadata: Mapping[str, Any], tokens: list[str], sentencepiece: bool) -> None:
    """The tokens that go around plain text. A SentencePiece file that says nothing wants its bos."""
    from tokenizers import processors

    bos = _token(metadata, tokens, "bos_token_id")
    eos = _token(metadata, tokens, "eos_token_id")
    first = [bos] if bos and metadata.get("tokenizer.ggml.add_bos_token", sentencepiece) else []
    last = [eos] if eos and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        ids = [(t, tokens.index(t)) for t in dict.fromkeys(first + last)]
        single, pair = [*first, "$A", *last], [*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1"]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair + [f"{t}:1" for t in last], special_tokens=ids
        )
