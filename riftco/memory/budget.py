"""What of a step fits in a budget of memory, by predictions alone."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..models.config import DecoderConfig
from ..models.load import open_source
from ..models.safetensors_folder import read_json
from ..train.config import FinetuneConfig, at_least, parse_size, pick_device
from .predict import CHECKPOINTING, ERROR, Prediction, predict
from .report import size

STEP = 64  # tokens; the longest row is found to this
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Fit:
    """What a budget allows with one kind of checkpointing.

    Attributes:
        peak: of what was asked for. fits: it is within the budget, with the error that it may have.
        batch: most rows of the asked length; 0: not one.
        tokens: the longest row that fits alone, in steps of 64.
    """

    checkpointing: str
    peak: Prediction
    fits: bool
    batch: int
    tokens: int

    def line(self, tokens: int) -> str:
        verdict = "fits" if self.fits else "does not fit"
        if self.batch:
            most = f"at most {self.batch} rows of {tokens} tokens, --batch-tokens {self.batch * tokens}"
        elif self.tokens:
            most = f"not one row of {tokens} tokens; one of {self.tokens} fits"
        else:
            most = "nothing fits: the weights and what is trained take it all"
        return f"{self.checkpointing:>10s}  {size(self.peak.peak_bytes):>10s}  {verdict}; {most}"


@dataclass(frozen=True)
class Forecast:
    """What `riftco memory --predict` says.

    Attributes:
        tokens, batch: of the micro-batch that was predicted.
        fits: with a budget, what it allows for each kind of checkpointing.
    """

    prediction: Prediction
    tokens: int
    batch: int
    target: str
    fits: tuple[Fit, ...] = ()

    def asdict(self) -> dict[str, Any]:
        return {"peak_bytes": self.prediction.peak_bytes, **dataclasses.asdict(self)}

    def lines(self) -> Iterable[str]:
        yield f"a micro-batch of {self.batch} x {self.tokens} tokens on {self.target}"
        yield from self.prediction.lines()
        for fit in self.fits:
            yield fit.line(self.tokens)


def forecast(
    path: str,
    given: Mapping[str, Any],
    *,
    tokens: int = 512,
    batch: int = 1,
    budget: str | None = None,
    device: str = "auto",
) -> Forecast:
    """The predicted peak of `riftco finetune` on the model at `path`, of which the config alone is read.

    Args:
        path: as in memory_of.
        given: fields of FinetuneConfig; None: its default. With batch_tokens a micro-batch is as many rows of
            max_length (or the model's context, or batch_tokens where that is less) as fit in it, one at least.
        tokens, batch: the micro-batch without batch_tokens.
        budget: bytes, or a number with a unit ("24GiB").
        device: the type of the device, which need not be here; auto: what a run would take on this machine.
    """
    settings = FinetuneConfig(model=path, data="", output="", **{k: v for k, v in given.items() if v is not None})
    file = pathlib.Path(path).expanduser()
    config = DecoderConfig.from_hf(read_json(file)) if file.name == "config.json" else open_source(path).config
    if given.get("batch_tokens") is not None:
        longest = settings.max_length or config.max_position_embeddings
        tokens = min(longest, settings.batch_tokens)
        batch = max(1, settings.batch_tokens // tokens)
    at_least("tokens", tokens, 2)
    at_least("batch", batch, 1)
    target = (pick_device(device) if device == "auto" else torch.device(device)).type
    limit = None if budget is None else parse_size("--budget", budget)
    prediction = predict(config, settings, tokens=tokens, batch=batch, target=target)
    fits = () if limit is None else fitting(config, settings, limit, tokens=tokens, batch=batch, target=target)
    return Forecast(prediction, tokens, batch, target, tuple(fits))


def fitting(
    config: DecoderConfig, settings: FinetuneConfig, budget: int, *, tokens: int, batch: int = 1, target: str = "cuda"
) -> list[Fit]:
    """What fits in `budget` bytes, for the asked checkpointing and those that take less memory."""
    fits = []
    modes = CHECKPOINTING[CHECKPOINTING.index(settings.activation_checkpointing) :]
    for mode in modes:
        chosen = dataclasses.replace(settings, activation_checkpointing=mode)

        def peak(length: int, rows: int, chosen: FinetuneConfig = chosen) -> Prediction:
            return predict(config, chosen, tokens=length, batch=rows, target=target)

        def within(p: Prediction) -> bool:
            return p.peak_bytes * (1 + ERROR) <= budget

        asked = peak(tokens, batch)
        most = _most(lambda n: peak(tokens, n).peak_bytes * (1 + ERROR), budget, MOST_ROWS)
        longest = tokens
        if not most:
            longest = STEP * _most(lambda n: peak(STEP * n, 1).peak_bytes * (1 + ERROR), budget, tokens // STEP)
        fits.append(Fit(mode, asked, within(asked), most, longest))
    return fits


def _most(cost: Callable[[int], float], budget: float, limit: int) -> int:
    """The largest n from 1 to `limit` whose cost is within the budget, 0 if none; cost grows about linearly."""
    known: dict[int, float] = {}

    def of(n: int) -> float:
        if n not in known:
            known[n] = cost(n)
        return known[n]

    if limit < 1 or of(1) > budget:
        return 0
    low, high, step = 1, limit + 1, 2  # low fits, high does not
    while high - low > 1:
        if len(known) > 1:  # the line through the two nearest says where the budget ends
            a, b = sorted(known)[-2:] if high > limit else (low, high)
            slope = (of(b) - of(a)) / (b - a)
            guess = int(a + (budget - of(a)) / slope) if slope > 0 else high - 1
        else:
            guess = step
        if guess in known or not low < guess < high:
            guess = min(max(guess, low + 1), high - 1)
        if of(guess) <= budget:
            low = guess
        else:
            high = guess
    return low
