"""Modules become instances of a subclass that differs in `forward` alone, and instances of their own class again.

A class, not an attribute `forward`, carries what is new: copies, pickles, hooks and wrappers of an instance's forward
(accelerate's, TRL's) go on working, and can be put on and taken off in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

OWN = "_riftco_own_class"
Maker = Callable[..., Callable]  # (the module's class, options) -> a forward


def swap(module: nn.Module, maker: Maker, *options: Any) -> None:
    """Give one module the forward that `maker` makes for its class."""
    module.__class__ = subclass(own_class(module), maker, *options)


def restore(module: nn.Module) -> bool:
    """Whether the module had been swapped."""
    found = own_class(module)
    swapped = found is not type(module)
    module.__class__ = found
    return swapped


def own_class(module: nn.Module) -> Any:
    return getattr(type(module), OWN, type(module))


@functools.cache
def subclass(base: Any, maker: Maker, *options: Any) -> type[nn.Module]:
    """One for each class and maker; it bears its base's name, which configs, FSDP and transformers go by."""

    def reduce(self, protocol: int):
        return _empty, (base, maker, *options), self.__getstate__()

    meta: Any = type(base)
    made = meta(base.__name__, (base,), {"forward": maker(base, *options), OWN: base, "__reduce_ex__": reduce})
    made.__module__, made.__qualname__, made.__doc__ = base.__module__, base.__qualname__, base.__doc__
    return made


def _empty(base: Any, maker: Maker, *options: Any) -> nn.Module:
    made = subclass(base, maker, *options)
    return made.__new__(made)
