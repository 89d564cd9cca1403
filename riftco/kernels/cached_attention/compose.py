"""A decoding step of a layer as three ops: rope, attention over the cache, the cache's write."""

from collections.abc import Callable

from torch import Tensor

from .._contract import launcher, meaning


def decode(q: Tensor, *rest) -> Tensor:
    """The op's arguments in the order of its schema, through each op's own launcher."""
    return _through(launcher, q, *rest)


def spec(q: Tensor, *rest) -> Tensor:
    """What the step means, in plain torch."""
    return _through(meaning, q, *rest)


def _through(
    find: Callable, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor,
    v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, arrived: Tensor | None, block_table: Tensor | None,
    slots: Tensor, positions: Tensor, rows: Tensor, sinks: Tensor | None, interleaved: bool, scale: float | None,
    left: int | None, softcap: float,
) -> Tensor:  # fmt: skip
    if cos is not None:
        q, k = find("rope", q)([q, k], cos, sin, None, interleaved, False)
    cache = (k_cache, v_cache, k_scale, v_scale)
    places = (block_table, slots, positions, None, None)
    longest = -(-len(q) // max(len(slots), 1))
    out, _ = find("cached_attention_fwd", q)(q, k, v, *cache, *places, sinks, scale, left, softcap, longest)
    find("cached_attention_write", q)(*cache, rows, k, v)
    return out
