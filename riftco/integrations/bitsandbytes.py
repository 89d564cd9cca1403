"""Quantised layers of bitsandbytes as riftco's NF4Linear, and back."""

from __future__ import annotations

import sys

from torch import nn

from ..nn import NF4Linear

ORIGINAL = "_riftco_original"


def is_nf4(module: nn.Module) -> bool:
    """Whether `module` is a bitsandbytes Linear4bit that holds quantised NF4 weights."""
    if "bitsandbytes" not in sys.modules:
        return False
    from bitsandbytes.nn import Linear4bit

    if type(module) is not Linear4bit:
        return False
    state = getattr(module.weight, "quant_state", None)
    return state is not None and state.quant_type == "nf4"


def replace(root: nn.Module) -> int:
    """Every Linear4bit (nf4) below `root` as an NF4Linear, none requantised; how many. The originals are kept aside."""
    return _exchange(root, is_nf4, _made)


def put_back(root: nn.Module) -> int:
    return _exchange(root, lambda m: ORIGINAL in vars(m), lambda m: vars(m)[ORIGINAL].to(m.weight.device))


def _made(original: nn.Module) -> nn.Module:
    made = NF4Linear.from_bnb(original)  # type: ignore[arg-type]
    vars(made)[ORIGINAL] = original  # beside the submodules: neither state_dict nor .to() sees it
    return made


def _exchange(root: nn.Module, chosen, new) -> int:
    found = [
        (parent, name, child) for parent in root.modules() for name, child in parent.named_children() if chosen(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, new(child))
    return len(found)
