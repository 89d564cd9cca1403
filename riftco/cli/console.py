"""How a run is shown: a bar on a terminal, a line per metric elsewhere, JSON lines on request."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..train.metrics import Evaluation, TrainingMetric
from ..train.run import Reporter


def reporter(*, log_json: bool) -> Reporter:
    """The reporter that fits where standard output goes."""
    if log_json:
        return JsonReporter()
    return BarReporter() if sys.stdout.isatty() else LineReporter()


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


class LineReporter(Reporter):
    """One plain line for everything."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, step: int, total: int) -> None:
        self.total = total

    def metric(self, metric: TrainingMetric) -> None:
        clipped = f" clip {metric.clip_scale:.3f}" if metric.clip_scale < 1 else ""
        self.note(
            f"step {metric.step}/{self.total} loss {metric.loss:.4f} norm {metric.gradient_norm:.3f}{clipped} "
            f"lr {metric.lr:.2e} {metric.tokens} labels {metric.tokens_per_s:.0f} tokens/s "
            f"peak {gib(metric.peak_bytes)}"
        )

    def evaluation(self, name: str, result: Evaluation) -> None:
        self.note(
            f"held out, {name}: loss {result.loss:.4f} perplexity {result.perplexity:.2f} "
            f"accuracy {result.accuracy:.1%} of {result.tokens} tokens"
        )


class BarReporter(LineReporter):
    """A progress bar that carries the newest metric."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metric]}"),
            TimeRemainingColumn(),
            console=self.console,
        )

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def begin(self, step: int, total: int) -> None:
        self.task = self.progress.add_task("training", total=total, completed=step, metric="")
        self.progress.start()

    def metric(self, metric: TrainingMetric) -> None:
        text = f"loss {metric.loss:.3f}  {metric.tokens_per_s:.0f} tokens/s  {gib(metric.peak_bytes)}"
        self.progress.update(self.task, completed=metric.step, metric=text)

    def end(self) -> None:
        self.progress.stop()


class JsonReporter(Reporter):
    """One JSON object a line, each with "event"."""

    def _print(self, event: str, **values) -> None:
        print(json.dumps({"event": event, **values}), flush=True)

    def note(self, text: str) -> None:
        self._print("note", text=text)

    def begin(self, step: int, total: int) -> None:
        self._print("begin", step=step, total=total)

    def metric(self, metric: TrainingMetric) -> None:
        self._print("step", **metric.asdict())

    def evaluation(self, name: str, result: Evaluation) -> None:
        self._print("evaluation", name=name, **result.asdict())

    def end(self) -> None:
        self._print("end")
