"""What a fine-tuning run is: every choice in one record, checked before anything is read or written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from .. import tpu
from ..adapters import AdapterError, LoraSpec
from ..models.decoder import ATTENTION
from .ranks import local_rank, local_world, started_by_torchrun
from .schedule import KINDS

METHODS = ("qlora", "lora", "full")
DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = ("auto", "nf4", "packed", "bf16", "fp32")
PARALLEL = ("auto", "ddp", "fsdp")
OPTIMIZER_STATES = ("auto", "contiguous", "paged", "paged-8bit")
DEFAULT_LR = {"qlora": 2e-4, "lora": 2e-4, "full": 2e-5}
# May change on --resume; everything else decides what the losses are, and must stay.
CHANGEABLE = frozenset(
    {
        "output",
        "steps",
        "epochs",
        "save_every",
        "eval_every",
        "keep",
        "device",
        "model",
        "data",
        "eval",
        "auto_micro_batch",
        "offload_activations",
        "offload_budget",
        "step_graph",
        "duty_cycle",
        "parallel",
        "metrics",
        "tensorboard",
        "wandb",
    }
)


class ConfigError(ValueError):
    """A setting out of range, or one that does not fit the run; the message names it and says what to do."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of `riftco finetune`; the command's --help explains each."""

    model: str
    data: str
    output: str
    eval: str | None = None
    eval_split: float = 0.0
    method: str = "qlora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str = "all-linear"
    exclude_modules: str = ""
    dora: bool = False
    rslora: bool = False
    rank_pattern: str = ""
    alpha_pattern: str = ""
    modules_to_save: str = ""
    train_tokens: str = ""
    bias: str = "none"
    lr: float | None = None
    schedule: str = "linear"
    warmup: int = 5
    steps: int | None = None
    epochs: int | None = None
    batch_tokens: int = 2048
    accumulate: int = 1
    chunk: int | None = None
    max_length: int | None = None
    truncate: bool = False
    skip_bad: bool = False
    stream: bool = False
    auto_micro_batch: bool = False
    offload_activations: bool = False
    offload_budget: str | None = None
    step_graph: bool = False
    duty_cycle: float = 1.0
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    activation_checkpointing: str = "disabled"
    attention: str = "flash"
    optimizer_state: str = "auto"
    parallel: str = "auto"
    save_every: int = 100
    keep: int = 2
    eval_every: int = 0
    early_stopping: int = 0
    keep_best: bool = False
    metrics: str | None = None
    tensorboard: str | None = None
    wandb: str | None = None

    def __post_init__(self) -> None:
        _choice("--method", self.method, METHODS)
        _choice("--dtype", self.dtype, DTYPES)
        _choice("--weights", self.weights, WEIGHTS)
        if self.method == "full" and self.weights in ("nf4", "packed"):
            raise ConfigError(
                f"--weights {self.weights} is frozen; --method full trains the weights: use lora or qlora"
            )
        if self.weights in ("bf16", "fp32") and self.dtype not in ("auto", self.weights):
            raise ConfigError(f"--weights {self.weights} and --dtype {self.dtype} exclude each other; give one of them")
        _choice("--attention", self.attention, ATTENTION)
        _choice("--optimizer-state", self.optimizer_state, OPTIMIZER_STATES)
        _choice("--parallel", self.parallel, PARALLEL)
        _choice("--schedule", self.schedule, KINDS)
        for name in ("rank", "batch_tokens", "accumulate", "save_every", "keep"):
            at_least(name, getattr(self, name), 1)
        for name in ("steps", "epochs", "max_length", "chunk"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        for name in ("warmup", "eval_every", "early_stopping"):
            at_least(name, getattr(self, name), 0)
        for name in ("alpha", "gradient_clip", *(() if self.lr is None else ("lr",))):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{_flag(name)} must be above 0; got {value}")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed must fit in 64 bits; got {self.seed}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout must be in [0, 1); got {self.dropout}")
        self.lora_spec()
        if not 0 <= self.eval_split < 1:
            raise ConfigError(f"--eval-split must be in [0, 1); got {self.eval_split}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"--weight-decay must be 0 or more; got {self.weight_decay}")
        if not 0 < self.duty_cycle <= 1:
            raise ConfigError(f"--duty-cycle must be in (0, 1]; got {self.duty_cycle}")
        if self.stream and self.steps is None:
            raise ConfigError("--stream needs --steps: nobody counts the examples of a streamed file beforehand")
        if self.stream and self.eval_split:
            raise ConfigError("--stream and --eval-split exclude each other; hold a file out with --eval")
        if self.eval_every and not (self.eval or self.eval_split):
            raise ConfigError("--eval-every needs held-out data: give --eval or --eval-split")
        for flag, asked in (("--early-stopping", self.early_stopping), ("--keep-best", self.keep_best)):
            if asked and not (self.eval_every and (self.eval or self.eval_split)):
                raise ConfigError(f"{flag} needs evaluations: give --eval-every, and --eval or --eval-split")
        if self.eval and self.eval_split:
            raise ConfigError("--eval and --eval-split exclude each other; give one of them")
        if self.offload_budget is not None and not self.offload_activations:
            raise ConfigError("--offload-budget needs --offload-activations")
        _ = self.offload_bytes  # refuses what is no size
        alone = {"chunk": self.chunk, "offload_activations": self.offload_activations, "step_graph": self.step_graph}
        if len(given := [_flag(name) for name, value in alone.items() if value]) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other; give one of them")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("--steps and --epochs exclude each other; give one of them")

    @property
    def idle(self) -> list[str]:
        """Flags of what shapes an adapter, where there is none."""
        return [_flag(n) for n in ADAPTER if self.method == "full" and getattr(self, n) != _DEFAULTS[n]]

    @property
    def rate(self) -> float:
        return DEFAULT_LR[self.method] if self.lr is None else self.lr

    def lora_spec(self) -> LoraSpec:
        """The adapter that is asked for; names, or where the text is none a regular expression."""
        excluded = _names_or_expression(self.exclude_modules)
        try:
            return LoraSpec(
                rank=self.rank,
                alpha=self.alpha,
                target_modules=_names_or_expression(self.target_modules),
                dropout=self.dropout,
                use_rslora=self.rslora,
                use_dora=self.dora,
                rank_pattern=_pattern("rank_pattern", self.rank_pattern, int),
                alpha_pattern=_pattern("alpha_pattern", self.alpha_pattern, float),
                exclude_modules=excluded,
                modules_to_save=_items(self.modules_to_save),
                trainable_token_indices=_token_ids(self.train_tokens),
                bias=self.bias,
            )
        except AdapterError as bad:
            raise ConfigError(f"the adapter's settings: {bad}") from None

    @property
    def held(self) -> str:
        """How the base's weights are held, as load_model names it."""
        if self.weights != "auto":
            return self.weights
        if self.method == "qlora":
            return "nf4"
        return "fp32" if self.method == "full" and self.dtype == "auto" else self.dtype

    @property
    def cut(self) -> bool:
        """Whether several processes hold the weights together, each a part, rather than each all of them."""
        return self.parallel == "fsdp" or (self.parallel == "auto" and self.method == "full")

    def check_processes(self, world: int) -> None:
        """Refuse what `world` processes cannot do together.

        Raises:
            ConfigError: naming the flag.
        """
        if world == 1:
            return
        if self.accumulate < world:
            raise ConfigError(
                f"--accumulate {self.accumulate}: a step of so many micro-batches leaves some of {world} processes "
                f"without one; start {self.accumulate} processes at most, or a new run with --accumulate {world}"
            )
        if not self.cut:
            return
        if self.held == "packed":
            raise ConfigError("--weights packed: GGUF's blocks are not cut over processes; use --weights nf4, or ddp")
        if self.method == "full" and self.moments == "paged-8bit":
            raise ConfigError("--optimizer-state paged-8bit cannot be cut over processes; use contiguous, or paged")
        for name in ("auto_micro_batch", "chunk", "offload_activations", "step_graph"):
            if getattr(self, name):
                raise ConfigError(
                    f"{_flag(name)} is not for weights that are cut over processes; leave it out, or use --parallel ddp"
                )

    @property
    def offload_bytes(self) -> int | None:
        return None if self.offload_budget is None else parse_size("--offload-budget", self.offload_budget)

    @property
    def moments(self) -> str:
        """How Adam keeps its moments: in pages for QLoRA unless said otherwise."""
        if self.optimizer_state != "auto":
            return self.optimizer_state
        return "paged" if self.method == "qlora" else "contiguous"

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


ADAPTER = (
    "rank", "alpha", "dropout", "target_modules", "exclude_modules", "dora", "rslora", "rank_pattern", "alpha_pattern",
    "modules_to_save", "train_tokens", "bias",
)  # fmt: skip
_DEFAULTS = {f.name: f.default for f in fields(FinetuneConfig)}


def configured(given: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> FinetuneConfig:
    """The config of the settings that were `given` (None: not given), on top of a stored run's where there is one.

    Raises:
        ConfigError: a setting out of range or missing, or one that a stored run may not change.
    """
    asked = {k: v for k, v in given.items() if v is not None}
    if stored is None:
        for name in ("model", "data", "output"):
            if name not in asked:
                raise ConfigError(f"{_flag(name)} is missing")
        return FinetuneConfig(**asked)
    known = {f.name for f in fields(FinetuneConfig)}
    if unknown := sorted(set(stored) - known):
        raise ConfigError(f"the run was written by another riftco: unknown settings {', '.join(unknown)}")
    try:
        before = FinetuneConfig(**stored)
    except TypeError as bad:  # a setting of another type, or none where one is needed
        raise ConfigError(f"the run's settings cannot be read ({bad}); use another --output") from None
    for name, value in asked.items():
        if name not in CHANGEABLE and value != getattr(before, name):
            raise ConfigError(
                f"{_flag(name)} {value} differs from the run's {getattr(before, name)}; "
                "leave it out to resume, or name another --output"
            )
    if "steps" in asked:
        before = replace(before, epochs=None)
    if "epochs" in asked:
        before = replace(before, steps=None)
    return replace(before, **asked)


ALIASES = {"metal": "mps", "tpu": "xla"}  # a backend's name -> the type of its device
PLACES = "auto, cpu, cuda, cuda:N, mps (or metal), tpu"


def device_of_process(name: str) -> torch.device:
    """The device of this process: pick_device's, and of several processes on a host the GPU of its own number."""
    if started_by_torchrun() < 2:
        return pick_device(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ConfigError(f"--device {name}: several processes run on cuda, a GPU each, or on cpu")
    if local_world() > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started {local_world()} processes, but PyTorch sees {torch.cuda.device_count()} GPUs here; "
            "start one process a GPU, or use --device cpu"
        )
    return torch.device("cuda", local_rank())


def pick_device(name: str) -> torch.device:
    """ "auto": a CUDA GPU where there is one, else the CPU. Any other name must be a device that is here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name in tpu.NAMES:
        if reason := tpu.why_not():
            raise ConfigError(f"--device {name}: {reason}, or use cpu")
        return tpu.device()
    try:
        device = torch.device(ALIASES.get(name, name))
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is not known; accepted: {PLACES}") from None
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if device.type not in here:
        raise ConfigError(f"--device {name!r} is not supported here; accepted: {PLACES}")
    if not here[device.type]:
        raise ConfigError(f"--device {name}: PyTorch sees no such device on this machine; use --device auto")
    return device


UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of two


def parse_size(flag: str, text: str) -> int:
    """Bytes of "24GiB", "24 GB" (both of 1024), "800 MiB" or a plain number."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT]?)i?B?)?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"{flag} must be a size such as 24GiB; got {text!r}")
    return int(float(found[1]) * (1 << UNITS[(found[2] or "").upper()]))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _items(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _names_or_expression(text: str) -> str | tuple[str, ...]:
    """Names joined by commas; "all-linear", or anything that no names are made of, is PEFT's text: an expression."""
    if text == "all-linear" or not re.fullmatch(r"[\w.,\s]*", text):
        return text
    return _items(text)


def _pattern(name: str, text: str, kind: type) -> dict[str, Any]:
    """ "q_proj=4,mlp.up_proj=8" as a mapping."""
    made = {}
    for part in _items(text):
        key, _, value = part.rpartition("=")
        try:
            made[key] = kind(value)
        except ValueError:
            key = ""
        if not key:
            raise ConfigError(f"{_flag(name)} must be NAME=NUMBER joined by commas; got {part!r}")
    return made


def _token_ids(text: str) -> tuple[int, ...]:
    """ "5,7,100-110": ids, and ranges with both ends."""
    made: list[int] = []
    for part in _items(text):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
            raise ConfigError(f"--train-tokens must be token ids or ranges joined by commas; got {part!r}")
        made += range(int(first), int(last or first) + 1)
    return tuple(made)


def _choice(flag: str, value: str, accepted: Iterable[str]) -> None:
    if value not in accepted:
        raise ConfigError(f"{flag} must be one of {', '.join(accepted)}; got {value!r}")


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a setting, named as its field, that is below `least` or no number of 31 bits."""
    if value < least or value >= 2**31:
        raise ConfigError(f"{_flag(name)} must be a whole number of {least} or more; got {value}")
