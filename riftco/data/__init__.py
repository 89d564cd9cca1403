"""Chat and token files to packed batches: reading, rendering, order, packing."""

from .batch import IGNORE, Batch, nothing, pack
from .buckets import Buckets
from .chat import Dataset, Example, Message, load_examples, parse_record, render
from .errors import DataError
from .geometry import Geometry
from .loader import Loader
from .packing import best_fit
from .plan import RowPlan
from .records import check_options
from .sampler import ShuffledOrder, WindowSampler
from .staging import Staging
from .stream import StreamLoader
from .tokens import TokenArrays, TokenLoader, load_tokens

__all__ = [
    "IGNORE",
    "Batch",
    "Buckets",
    "DataError",
    "Dataset",
    "Example",
    "Geometry",
    "Loader",
    "Message",
    "RowPlan",
    "ShuffledOrder",
    "Staging",
    "StreamLoader",
    "TokenArrays",
    "TokenLoader",
    "WindowSampler",
    "best_fit",
    "check_options",
    "load_examples",
    "load_tokens",
    "nothing",
    "pack",
    "parse_record",
    "render",
]
