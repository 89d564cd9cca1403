"""Activations that are cheaper to make again than to keep."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._contract import checks_enabled


class _Runs(threading.local):
    """What a thread runs: the backwards of a GPU's graphs have threads of their own."""

    replays = 0  # blocks that run again, within each other, for what their layers save: nobody reads what they return
    last = False  # a block's last product
    unread = False  # that product in a replay
    wanted = False  # what a last product has read is unpacked, and a replay may make it on the way
    products = 0  # last products that a replay has come to since
    read: Tensor | None = None  # what the only one has read


_runs = _Runs()


class _Place(NamedTuple):
    """Where a saved view of the activation lies in it."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    last: bool  # a block's last product read it


class _Packed(NamedTuple):
    """What the hooks around the block made of a tensor."""

    value: Any


def saved(ctx) -> tuple[Tensor | None, ...]:
    """ctx.saved_tensors in a backward, or what `recomputed` has unpacked just before: checkpointing unpacks once."""
    unpacked, ctx.unpacked = ctx.unpacked, None
    return ctx.saved_tensors if unpacked is None else unpacked


@contextlib.contextmanager
def recomputed(h: Tensor) -> Iterator[None]:
    """Within the with-block, a layer that saves `h` for its backward saves nothing: the backward makes `h` again.

        h = swiglu(gate, up)
        with recomputed(h):
            out = down_proj(h)  # a Linear, a LoRALinear, ... : no [tokens, F] is kept beside gate and up

    `h` is made by the operation that made it, from what that operation has saved anyway, so bit for bit; once for each
    layer that reads it. What else the layers save is saved as ever, through hooks (checkpointing, offloading) too.

    Args:
        h: what `swiglu`, `geglu`, `rms_norm` or `layer_norm` returned (of a norm with a residual the first output), or
            a view of it. Where autograd records nothing the block does nothing, and inside torch.compile, whose
            partitioner decides for itself.

    Raises:
        ValueError: another operation made `h`.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not h.requires_grad or h.numel() == 0:
        yield
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func takes no hooks
        yield
        return
    made = h if h._base is None else h._base
    node: Any = made.grad_fn
    again = getattr(getattr(node, "_forward_cls", None), "again", None)
    if again is None or made.output_nr != 0:
        raise ValueError(f"recomputed: h must come from swiglu, geglu, rms_norm or layer_norm; it comes from {node}")
    # the hooks outlive the block with the graph, so that they must not hold the tensor itself
    at, dtype, device = made.untyped_storage()._cdata, made.dtype, made.device
    del h, made
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(t: Tensor) -> Any:
        if t.dtype == dtype and t.device == device and t.untyped_storage()._cdata == at:
            return _Place(t.shape, t.stride(), int(t.storage_offset()), _runs.last)
        # detached: a layer that saves what it returns would hold itself through it, for ever where no backward comes
        if outer is None:
            return t if t.grad_fn is None else t.detach()
        return _Packed(outer[0](t))

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _Place):
            tensors, read = (node.unpacked, None) if node.unpacked else _unpacked(node, saved.last)
            node.unpacked = None if outer is None else tensors
            with torch.no_grad():
                h = again(node, *tensors) if read is None else read
                return h.as_strided(saved.shape, saved.stride, saved.offset)
        return outer[1](saved.value) if isinstance(saved, _Packed) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _unpacked(node: Any, last: bool) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """What an activation's maker saved. A checkpointed block is run again for that, and its backward begins with its
    last product: what that reads then need not be made a third time. Where a checkpoint is over several blocks nothing
    says whose it is."""
    _runs.wanted, _runs.products = last, 0
    try:
        return node.saved_tensors, _runs.read
    finally:
        _runs.wanted, _runs.read = False, None


class replay:
    """Within the with-block a checkpointed block runs again for its backward: the second context that checkpointing's
    `context_fn` gives.

        checkpoint(block, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), replay()))

    Then the block's `last_product` leaves its result out of the replay. Checkpointing enters it for every backward
    through a graph that is retained.
    """

    def __enter__(self) -> None:
        _runs.replays += 1

    def __exit__(self, *error: object) -> None:
        _runs.replays -= 1


def last_product(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), which a block returns, or adds to something and returns, and reads nowhere else.

    Checkpointing ends a replay once everything is there that was saved, and a layer saves after it has computed. So in
    a `replay` a layer that may saves what it ever does and leaves its product out: the result is memory that was not
    written. A block that reads it all the same, as a square or a norm of it does, gets gradients of whatever lies there
    (of NaN with RIFTCO_CHECK=1). What `recomputed` spares such a layer is then not made a third time either.

    Args:
        layer: a LoRALinear without DoRA, an NF4Linear or a GGUFLinear that no hook watches; any other is just called.
        x: [..., C].

    Returns:
        [..., N]; in a replay not to be read.
    """
    may = getattr(layer, "saves_without_result", None)
    if torch.compiler.is_compiling() or may is None or not may():
        return layer(x)
    if _runs.wanted:
        _runs.products += 1
        _runs.read = x.detach() if _runs.products == 1 else None
    _runs.last, _runs.unread = True, _runs.replays > 0
    try:
        return layer(x)
    finally:
        _runs.last = _runs.unread = False


def unread() -> bool:
    """Whether nobody reads the result of the layer that runs."""
    return _runs.unread


def unwritten(x: Tensor, features: int) -> Tensor:
    """[..., features] for x [..., C], in the place of a result that nobody reads; with RIFTCO_CHECK=1, who does read it
    gets NaN."""
    out = x.new_empty((*x.shape[:-1], features))
    return out.fill_(torch.nan) if checks_enabled() else out
