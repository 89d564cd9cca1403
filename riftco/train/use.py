"""What the commands around training do: load with an adapter, evaluate a file, look at data, explain."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import cpu, explain, functional
from ..adapters import base_weights_of, load_adapter
from ..data import DataError, Dataset, Loader, check_options, load_examples
from ..functional import attention_backward
from ..models import Decoder, Tokenizer, load_model, load_tokenizer
from ..models.gguf import GGUFFile
from ..models.load import open_source
from .config import ALIASES, ConfigError, at_least, pick_device
from .evaluate import evaluate
from .metrics import Evaluation
from .run import head_shape

PACKED = ("cpu", "cuda", "mps")  # devices that have products of GGUF's blocks


@dataclass(frozen=True)
class Loaded:
    model: Decoder
    tokenizer: Tokenizer
    device: torch.device


def load(path: str, *, adapter: str | None = None, weights: str = "auto", device: str = "auto") -> Loaded:
    """A model ready for use, with an adapter on it where one is named.

    "auto" holds the weights as they were while the adapter was trained, where its folder says so.
    """
    if weights == "auto" and adapter is not None:
        weights = base_weights_of(adapter) or "auto"
    where = pick_device(device)
    model, tokenizer = load_model(path, weights=weights, device=where)
    assert tokenizer is not None  # only with_tokenizer=False leaves it out
    if adapter is not None:
        load_adapter(model, adapter)
    return Loaded(model.eval(), tokenizer, where)


def load_to_serve(path: str, *, weights: str = "auto", device: str = "auto") -> tuple[Loaded, str]:
    """A model for a server, and in a few words how its weights are held.

    "auto" keeps the blocks of a GGUF file that has them on a device with products of such, on a CPU where decoding is
    compiled; else it is that of load_model.
    """
    where, why = pick_device(device), ""
    source = open_source(path)
    if weights == "auto" and isinstance(source, GGUFFile) and source.packable and where.type in PACKED:
        why = cpu.why_not() if where.type == "cpu" else ""
        weights = "auto" if why else "packed"
        why = f"; not packed: {why}" if why else ""
    loaded = load(path, weights=weights, device=device)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    if weights == "packed":
        assert isinstance(source, GGUFFile)  # or it was refused
        return loaded, f"packed as in the file ({', '.join(source.kinds)}), all else {dtype}"
    return loaded, f"{'nf4' if weights == 'nf4' else dtype}{why}"


def messages(prompt: str, system: str | None = None) -> list[dict[str, str]]:
    """One question, with a system message where one is given."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def template_options(given: str | None) -> dict[str, Any]:
    """Options of the chat template: the object that a JSON text holds."""
    try:
        made = json.loads(given or "{}")
    except (ValueError, RecursionError) as why:
        raise ConfigError(f"--chat-template-kwargs is no JSON: {why}") from None
    if not isinstance(made, dict):
        raise ConfigError(f"--chat-template-kwargs must be a JSON object; got {given}")
    check_options(made)
    return made


def evaluate_file(
    loaded: Loaded,
    path: str,
    *,
    batch_tokens: int = 2048,
    max_length: int | None = None,
    truncate: bool = False,
    skip_bad: bool = False,
) -> tuple[Evaluation, Dataset]:
    """Evaluate on a JSONL file; also what was read of it."""
    context = loaded.model.config.max_position_embeddings
    longest = context if max_length is None else max_length
    at_least("batch_tokens", batch_tokens, 1)
    at_least("max_length", longest, 1)
    if longest > context:
        raise ConfigError(f"--max-length {longest} is longer than this model's context of {context} tokens")
    data = load_examples(path, loaded.tokenizer, max_length=longest, truncate=truncate, skip_bad=skip_bad)
    tokens = max(batch_tokens, max(len(e) for e in data.examples))
    batches = Loader(data.examples, tokens, 0).sequential()
    return evaluate(loaded.model, batches, loaded.device), data


def explained(device: str | None, dtype: str, op: str | None, model: str | None = None) -> list[dict[str, str]]:
    """Rows of riftco.explain for names as a user types them; with a model, one row instead: the attention backward
    that a run on `device` would pick for its head shape."""
    devices, dtypes = ("cpu", "cuda", "mps", "xla"), ("float32", "float16", "bfloat16", "float64")
    device = ALIASES.get(device or "", device)
    if device is not None and device not in devices:
        raise ConfigError(f"--device must be one of {', '.join(devices)}; got {device!r}")
    if dtype not in dtypes:
        raise ConfigError(f"--dtype must be one of {', '.join(dtypes)}; got {dtype!r}")
    if model is not None:
        where = pick_device(device or "auto")
        with attention_backward(
            [where], getattr(torch, dtype), *head_shape(open_source(model).config), packed=True
        ) as choice:
            row = {"op": "attention_bwd", "device": where.type, "implementation": choice.path, "why": choice.why}
        return [row]
    every = [*explain(device, getattr(torch, dtype)), *_decoding(device)]
    rows = [r for r in every if op is None or op in r["op"]]
    if not rows:
        # a function of riftco.functional that shares its room's ops, under another name
        room = [*getattr(getattr(functional, op or "", None), "__module__", "").split("."), "", ""][2]
        hint = f"{op} runs on those of --op {room}" if any(room and room in r["op"] for r in every) else ""
        raise ConfigError(f"no op's name contains {op!r}; {hint or 'riftco explain lists all'}")
    return rows


def _decoding(device: str | None) -> list[dict[str, str]]:
    """What decodes a few rows of a model on a CPU."""
    if device not in (None, "cpu"):
        return []
    why = cpu.described()
    path = "riftco.models.decoder:Decoder.hidden" if cpu.why_not() else "csrc/cpu/step.cpp"
    return [{"op": "decode_step", "device": "cpu", "implementation": path, "why": why}]


@dataclass(frozen=True)
class Inspected:
    """One example: its text in runs of equal weight."""

    line: int
    tokens: int
    labelled: int
    pieces: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Inspection:
    examples: tuple[Inspected, ...]
    summary: tuple[str, ...]

    def chosen(self, count: int, line: int | None) -> Sequence[Inspected]:
        if line is None:
            return self.examples[: max(count, 0)]
        found = [e for e in self.examples if e.line == line]
        if not found:
            raise DataError(f"--line {line} is no example of this file")
        return found


def inspected(
    path: str, model: str, *, max_length: int | None = None, truncate: bool = False, skip_bad: bool = False
) -> Inspection:
    """What training would see of a file; only the model's tokenizer and config are read."""
    source = open_source(model)
    tokenizer, context = load_tokenizer(model, source=source), source.config.max_position_embeddings
    data = load_examples(path, tokenizer, max_length=max_length or context, truncate=truncate, skip_bad=skip_bad)
    examples = tuple(
        Inspected(
            line=e.line,
            tokens=len(e),
            labelled=e.n_labelled,
            pieces=tuple(
                (tokenizer.decode([i for i, _ in run]), weight)
                for weight, run in itertools.groupby(zip(e.ids, e.weights, strict=True), key=lambda pair: pair[1])
            ),
        )
        for e in data.examples
    )
    lengths = sorted(e.tokens for e in examples)
    total, labelled = sum(lengths), sum(e.labelled for e in examples)
    summary = [
        f"{len(examples)} examples, {total} tokens, {labelled} trained on ({labelled / total:.0%})",
        f"length: shortest {lengths[0]}, median {statistics.median(lengths):g}, "
        f"longest {lengths[-1]}; the model's context is {context}",
    ]
    if data.truncated:
        summary.append(f"{data.truncated} examples were cut to {max_length or context} tokens")
    if data.skipped:
        summary += [f"{len(data.skipped)} bad lines were skipped:", *(f"  {s}" for s in data.skipped[:10])]
    return Inspection(examples, tuple(summary))
