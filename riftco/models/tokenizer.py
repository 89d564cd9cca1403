"""Text to tokens and chat to text: one tokenizer, from a Hugging Face folder or built from a GGUF file."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ModelError, package

# Tokens that end a turn or a text, where a vocabulary marks them as control tokens.
END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>",
)  # fmt: skip
SOURCE = "riftco_source.json"  # beside a cached conversion: which file it was made from


class Tokenizer:
    """A tokenizer with its chat template and the ids at which a reply ends.

    Attributes:
        hf: the transformers tokenizer inside.
        stop_ids: ids that end generation.
        bos_id, eos_id, pad_id: ids or None.
    """

    def __init__(self, hf: Any, stop_ids: Sequence[int] = ()):
        self.hf = hf
        self._added = hf.added_tokens_decoder
        special = set(hf.all_special_ids) | {i for i, t in self._added.items() if t.special}
        vocabulary = hf.get_vocab()
        named = {vocabulary[t] for t in END_TOKENS if vocabulary.get(t) in special}
        eos = set() if hf.eos_token_id is None else {hf.eos_token_id}
        self.stop_ids = frozenset({int(i) for i in stop_ids} | named | eos)
        self.bos_id: int | None = hf.bos_token_id
        self.eos_id: int | None = hf.eos_token_id
        self.pad_id: int | None = hf.pad_token_id

    @property
    def vocabulary_size(self) -> int:
        """Every id is below it."""
        return max(self.hf.get_vocab().values()) + 1

    def ids_of(self, special: Sequence[str]) -> dict[int, str]:
        """Which of these the vocabulary has as tokens that are not shown: id -> text."""
        return {i: t.content for i, t in self._added.items() if t.special and t.content in special}

    def tokens_of(self, texts: Sequence[str]) -> dict[str, int]:
        """Which of these are tokens of their own, shown or not: text -> id."""
        return {t.content: i for i, t in self._added.items() if t.content in texts}

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def template(self, tools: bool = False) -> str:
        """The chat template's source; where a model has several, that for conversations with tools or the plain one."""
        if not self.has_chat_template:
            raise ModelError(
                "this model has no chat template; put one beside its tokenizer (chat_template.jinja), or use plain text"
            )
        return self.hf.get_chat_template(tools=[{}] if tools else None)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those that the model expects around plain text.

        Special tokens written out in the text, as a rendered chat has them, become their ids.
        """
        return self._call(text, add_special_tokens=add_special_tokens)["input_ids"]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, for each, the span of characters of `text` that it came from."""
        out = self._call(text, add_special_tokens=False, return_offsets_mapping=True)
        return out["input_ids"], [(a, b) for a, b in out["offset_mapping"]]

    def _call(self, text: str, **options: Any) -> Mapping[str, Any]:
        try:
            text.encode()
        except UnicodeEncodeError as why:
            raise ModelError(
                f"character {why.start} of the text is {text[why.start]!r}, half of a surrogate pair and no character"
            ) from None
        return self.hf(text, verbose=False, **options)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    @functools.cached_property
    def _byte_level(self) -> dict[str, int] | None:
        """Letter -> byte, where the vocabulary writes bytes as letters (GPT-2's way)."""
        decoder = json.loads(self.hf.backend_tokenizer.to_str())["decoder"] or {}
        if "ByteLevel" not in [part["type"] for part in (decoder, *decoder.get("decoders", ()))]:
            return None
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, which may be a part of a character."""
        piece, letters = self.hf.convert_ids_to_tokens(token) or "", self._byte_level
        if token in self._added:
            return piece.encode()
        if letters is not None:
            return bytes(letters[c] for c in piece) if all(c in letters for c in piece) else piece.encode()
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **options: Any
    ) -> str:
        """The text that the model's chat template makes of OpenAI-style messages.

        `options` are the template's own (`enable_thinking`, `tools`).
        """
        self.template()
        import jinja2

        try:
            return self.hf.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except RecursionError:
            raise ModelError("the chat template refuses these messages: they are nested too deeply") from None
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError, OverflowError) as why:
            raise ModelError(f"the chat template refuses these messages: {why}") from why

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
        self.hf.save_pretrained(str(folder))


class Text:
    """Pieces of whole characters out of tokens as they come; each decoded behind the one before it, so that spaces
    between words survive."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.ids = tokenizer, list[int]()
        self._before = self._shown = 0  # ids[before:shown] is the piece before; ids[:shown] are out

    def _piece(self) -> str:
        known = self.tokenizer.decode(self.ids[self._before : self._shown], skip_special_tokens=True)
        return self.tokenizer.decode(self.ids[self._before :], skip_special_tokens=True)[len(known) :]

    def add(self, token: int) -> str:
        """What can be shown now: nothing while it ends inside a character."""
        self.ids.append(token)
        text = self._piece()
        if not text or text.endswith("\ufffd"):
            return ""
        self._before, self._shown = self._shown, len(self.ids)
        return text

    def rest(self) -> str:
        """At the end: what is left, broken characters included."""
        return self._piece() if self._shown < len(self.ids) else ""


def from_folder(folder: Path, stop_ids: Sequence[int] = ()) -> Tokenizer:
    """From the tokenizer files of a local folder."""
    if not any((folder / n).exists() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder}: no tokenizer; accepted: tokenizer.json, tokenizer.model or vocab.json")
    reader = package("transformers").AutoTokenizer
    try:
        hf = reader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as why:  # the reader raises its own errors, of many types, for files that it cannot read
        reason = (str(why).splitlines() or [type(why).__name__])[0]
        raise ModelError(f"{folder}: its tokenizer files cannot be read ({reason})") from why
    return Tokenizer(hf, [*stop_ids, *_generation_stops(folder)])


def _generation_stops(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        eos = json.loads(file.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as why:
        raise ModelError(f"{file}: not a readable JSON object") from why
    return list(eos) if isinstance(eos, list) else [] if eos is None else [eos]


def from_gguf(path: Path, metadata: Mapping[str, Any], digest: str, cache_dir: Path | None = None) -> Tokenizer:
    """From a GGUF file's metadata; the conversion is kept in `cache_dir`, beside the digest of its source."""
    stops = [metadata[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in metadata]
    if cache_dir is not None and _cached_source(cache_dir) == digest:
        return from_folder(cache_dir, stops)
    from .gguf_tokenizer import convert

    made = Tokenizer(convert(path, metadata), stops)
    if cache_dir is not None:
        _write_cache(made, cache_dir, digest)
    return made


def _cached_source(cache_dir: Path) -> str | None:
    try:
        return json.loads((cache_dir / SOURCE).read_text())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no cache, or one that was never finished: convert again


def _write_cache(made: Tokenizer, cache_dir: Path, digest: str) -> None:
    """The folder appears whole or not at all."""
    cache_dir.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{cache_dir.name}-", dir=cache_dir.parent))
    try:
        made.save(fresh)
        (fresh / SOURCE).write_text(json.dumps({"digest": digest}))
        if cache_dir.exists():
            shutil.rmtree(cache_dir)
        fresh.rename(cache_dir)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
