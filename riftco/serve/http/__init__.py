"""HTTP over the scheduler: the OpenAI, Anthropic and llama.cpp dialects of one generation, and learning."""

from .app import create_app
from .service import Limits, Service

__all__ = ["Limits", "Service", "create_app"]
