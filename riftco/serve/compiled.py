"""Which batches of an engine on a CPU the compiled decoding serves: few rows, of any slots and lengths."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import nn

from ..models import Decoder, KVCache
from ..models.compiled import MOST_ROWS, CompiledDecoder, Unfit
from .bank import PREPARED, AdapterSet

log = logging.getLogger(__name__)
Layers = Mapping[str, nn.Module]


class CompiledSteps:
    """
    Args:
        model, cache: the engine's; the model's own tensors stay where they are.
        off: why not to try; "" to try.

    Attributes:
        off: why every batch is decoded in Python; "" while few rows are not.
    """

    def __init__(self, model: Decoder, cache: KVCache, off: str = ""):
        self.model, self.cache, self.off = model, cache, off
        self._ready: OrderedDict[AdapterSet, tuple[Layers, CompiledDecoder]] = OrderedDict()

    def find(
        self, key: AdapterSet, layers: Layers, serving: Callable[[], AbstractContextManager], rows: int = 1
    ) -> CompiledDecoder | None:
        """What serves so many rows under these adapters, whose layers `serving` puts into the model.

        None: Python does, as rows are many or a layer's calls are watched.
        """
        if self.off or rows > MOST_ROWS:
            return None
        held = self._ready.get(key)
        if held is None or held[0] is not layers:
            try:
                with serving():
                    held = layers, CompiledDecoder(self.model, self.cache)
            except Unfit as why:
                self.off = str(why)
                log.warning("decoding stays in Python: %s", self.off)
                return None
            self._ready[key] = held
            while len(self._ready) > PREPARED:
                self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return None if held[1].watched else held[1]
