"""Serving that learns in place: slots, adapters with versions, one learner."""

from .bank import AdapterBank, AdapterSet, Use
from .batch import Batch, Refused
from .engine import Decoded, Engine
from .learner import Learner, LearnOutcome, Lesson
from .store import Store

__all__ = [
    "AdapterBank",
    "AdapterSet",
    "Batch",
    "Decoded",
    "Engine",
    "LearnOutcome",
    "Learner",
    "Lesson",
    "Refused",
    "Store",
    "Use",
]
