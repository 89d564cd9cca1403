"""Chat files to packed batches: reading, rendering, order, packing."""

from .batch import IGNORE, Batch, Loader, pack
from .chat import Dataset, Example, Message, load_examples, parse_record, render
from .errors import DataError
from .sampler import ShuffledOrder, WindowSampler

__all__ = [
    "IGNORE",
    "Batch",
    "DataError",
    "Dataset",
    "Example",
    "Loader",
    "Message",
    "ShuffledOrder",
    "WindowSampler",
    "load_examples",
    "pack",
    "parse_record",
    "render",
]
