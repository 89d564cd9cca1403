"""Serving that learns in place: slots, adapters with versions, one learner."""

from .bank import AdapterBank, AdapterSet, Use
from .batch import Batch, Refused
from .conversation import Chat, reply_tokens, serving_prompt_tokens
from .engine import Decoded, Engine
from .learner import Learner, LearnOutcome, Lesson
from .requests import Finished, Request, Teach, Ticket
from .sampling import Chosen, Sampling
from .scheduler import Scheduler
from .store import Store

__all__ = [
    "AdapterBank",
    "AdapterSet",
    "Batch",
    "Chat",
    "Chosen",
    "Decoded",
    "Engine",
    "Finished",
    "LearnOutcome",
    "Learner",
    "Lesson",
    "Refused",
    "Request",
    "Sampling",
    "Scheduler",
    "Store",
    "Teach",
    "Ticket",
    "Use",
    "reply_tokens",
    "serving_prompt_tokens",
]
