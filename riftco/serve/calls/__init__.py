"""Calls of tools: how models write them, read out of a reply as it comes, and asked for by a grammar."""

from .call import Call, Tool
from .formats import Format, format_of
from .held import CallGrammar
from .reader import Reader

__all__ = ["Call", "CallGrammar", "Format", "Reader", "Tool", "format_of"]
