"""The training loop, its metrics, failures, evaluation and checkpoints."""

from .chunked import WalkResult, read, walk, walk_runs
from .duty import DutyCycle
from .evaluate import evaluate
from .failures import StepAbandoned, TrainerPoisoned
from .loop import Trainer, current_progress
from .metrics import Evaluation, Progress, RunReport, TrainingMetric
from .offload import Offload
from .ranks import Ranks
from .schedule import Schedule
from .scope import Scope
from .step_graph import StepGraph
from .watch import PeerLost

__all__ = [
    "DutyCycle",
    "Evaluation",
    "Offload",
    "PeerLost",
    "Progress",
    "Ranks",
    "RunReport",
    "Schedule",
    "Scope",
    "StepAbandoned",
    "StepGraph",
    "Trainer",
    "TrainerPoisoned",
    "TrainingMetric",
    "WalkResult",
    "current_progress",
    "evaluate",
    "read",
    "walk",
    "walk_runs",
]
