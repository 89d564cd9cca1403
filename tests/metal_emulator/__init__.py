"""Runs Metal shaders, and riftco's launch code for them, on a Linux CPU. A test tool; README.md says what it proves."""

from .extension import CSRC, build, install, recording, schedule
from .jobs import Argument, Job, Replay
from .shaders import library, lint, translated
from .toolchain import CompileError, why_not, why_not_sanitizer
from .translate import MetalError

__all__ = [
    "CSRC",
    "Argument",
    "CompileError",
    "Job",
    "MetalError",
    "Replay",
    "build",
    "install",
    "library",
    "lint",
    "recording",
    "schedule",
    "translated",
    "why_not",
    "why_not_sanitizer",
]
