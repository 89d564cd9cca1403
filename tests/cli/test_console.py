"""What a terminal shows."""

import io

from rich.console import Console

from riftco.cli.console import BarReporter
from riftco.train import Evaluation, TrainingMetric


def test_the_bar_carries_the_newest_metric():
    shown = BarReporter()
    shown.console = Console(file=io.StringIO(), force_terminal=True, width=160, highlight=False)
    shown.progress.live.console = shown.console
    shown.begin(2, 4)
    shown.metric(TrainingMetric(3, 1.25, 0.5, 1.0, 1e-3, 10, 20, 321.0, 3 << 30, 0))
    shown.progress.refresh()
    shown.end()
    shown.evaluation("after training", Evaluation(0.5, 1.6487, 0.75, 8))
    shown.note("[not markup]")
    text = shown.console.file.getvalue()
    assert "3/4" in text
    assert "loss 1.250  321 tokens/s  3.00 GiB" in text
    assert "held out, after training: loss 0.5000 perplexity 1.65 accuracy 75.0% of 8 tokens" in text
    assert "[not markup]" in text
