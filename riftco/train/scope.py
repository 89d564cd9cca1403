"""A with-block at whose end logits and losses are gone, whoever still has a name for them."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor


class Scope:
    """Releases the tensors that it was given when its with-block ends, by an error too.

        with Scope() as scope:
            logits = scope(model(ids))
            loss = scope(cross_entropy(logits, target))
            loss.backward()
        # the memory of logits is free, and so is what the graph behind loss had kept

    In Python a tensor lives as long as a name: logits of the step before would stand beside those of the next.
    Gradients stay, and so does what was not given. A released tensor is empty, so that using it is an error of shapes;
    a value that is needed later is read inside (`loss.item()`), or `detach().clone()`d.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def __call__(self, t: Tensor) -> Tensor:
        """Release `t` at the end; returns it.

        Raises:
            ValueError: a leaf that requires a gradient (a parameter), or a view, whose memory is another tensor's.
        """
        if t.is_leaf and t.requires_grad:
            raise ValueError("Scope: a parameter stays; give what was computed from it")
        if t._is_view():
            raise ValueError("Scope: a view has no memory of its own; give the tensor that it is a view of")
        self._tensors.append(t)
        return t

    def __enter__(self) -> Scope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with torch.no_grad():
            while self._tensors:
                self._tensors.pop().detach_().set_()  # type: ignore[call-overload]
