"""Where metrics go: each is a callable for Trainer's `sinks` that also takes evaluations, and is closed at the end."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
from typing import Any, Protocol, TextIO

from .metrics import Evaluation, TrainingMetric


class Sink(Protocol):
    def __call__(self, metric: TrainingMetric) -> None: ...

    def evaluation(self, step: int, result: Evaluation) -> None: ...

    def close(self) -> None: ...


class Stdout:
    """A line a step."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stdout

    def __call__(self, metric: TrainingMetric) -> None:
        print(f"step {metric.step} loss {metric.loss:.4f} lr {metric.lr:.2e}", file=self.stream, flush=True)

    def evaluation(self, step: int, result: Evaluation) -> None:
        print(f"step {step} held-out loss {result.loss:.4f}", file=self.stream, flush=True)

    def close(self) -> None: ...


class Jsonl:
    """A JSON object a line, appended: after a resume the last line of a step is the one that counts."""

    def __init__(self, path: str | os.PathLike[str]):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = pathlib.Path(path).open("a")  # noqa: SIM115 - closed by close()

    def _write(self, value: dict[str, Any]) -> None:
        self.file.write(json.dumps(value) + "\n")
        self.file.flush()

    def __call__(self, metric: TrainingMetric) -> None:
        self._write(metric.asdict())

    def evaluation(self, step: int, result: Evaluation) -> None:
        self._write({"step": step, "evaluation": result.asdict()})

    def close(self) -> None:
        self.file.close()


def package(option: str) -> Any:
    """The module behind --tensorboard or --wandb.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module({"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[option])
    except ModuleNotFoundError:
        raise ValueError(f"--{option} needs a package: pip install {option}") from None


class TensorBoard:
    """Scalars for TensorBoard; needs the package tensorboard."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.writer = package("tensorboard").SummaryWriter(str(folder))

    def __call__(self, metric: TrainingMetric) -> None:
        for name, value in metric.asdict().items():
            if name != "step":
                self.writer.add_scalar(f"train/{name}", value, metric.step)

    def evaluation(self, step: int, result: Evaluation) -> None:
        for name, value in result.asdict().items():
            self.writer.add_scalar(f"eval/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases; needs the package wandb."""

    def __init__(self, project: str, config: dict[str, Any] | None = None):
        self.run = package("wandb").init(project=project, config=config)

    def __call__(self, metric: TrainingMetric) -> None:
        values = metric.asdict()
        self.run.log({f"train/{k}": v for k, v in values.items() if k != "step"}, step=metric.step)

    def evaluation(self, step: int, result: Evaluation) -> None:
        self.run.log({f"eval/{k}": v for k, v in result.asdict().items()}, step=step)

    def close(self) -> None:
        self.run.finish()
