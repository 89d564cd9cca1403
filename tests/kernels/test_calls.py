"""Who sees the call of a module: what may be gone round, and what must be called."""

import copy

import pytest
from torch import nn

from riftco.kernels._calls import sole_call
from riftco.nn import LoRALinear, hooked, own_call, plain_call


class Louder(LoRALinear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(LoRALinear):
    """Another class with the same forward."""


def replaced(layer):
    layer.forward = lambda x: x


def nothing(*_):
    return None


# what was done to a layer -> hooked, own_call, plain_call, sole_call
CHANGES = {
    "nothing": (lambda layer: None, (False, True, True, True)),
    "a forward hook": (lambda layer: layer.register_forward_hook(nothing), (True, False, False, False)),
    "a forward pre-hook": (lambda layer: layer.register_forward_pre_hook(nothing), (True, True, False, False)),
    "a backward hook": (lambda layer: layer.register_full_backward_hook(nothing), (True, True, False, False)),
    "a backward pre-hook": (lambda layer: layer.register_full_backward_pre_hook(nothing), (True, True, False, False)),
    "a forward of its own": (replaced, (False, False, False, False)),
    "compiled": (lambda layer: layer.compile(), (False, False, False, False)),
    "a hook in a child": (
        lambda layer: layer.base_layer.register_forward_pre_hook(nothing),
        (False, True, True, False),
    ),
    "a class with the same forward": (lambda layer: setattr(layer, "__class__", Named), (False, True, True, False)),
    "a class with another": (lambda layer: setattr(layer, "__class__", Louder), (False, False, False, False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_who_sees_a_call(change):
    change, expected = CHANGES[change]
    layer = LoRALinear(nn.Linear(4, 4), 2, 2.0)
    change(layer)
    assert (hooked(layer), *(ask(layer, LoRALinear) for ask in (own_call, plain_call, sole_call))) == expected


def test_an_empty_child_and_a_copy_change_nothing():
    layer = LoRALinear(nn.Linear(4, 4), 2, 2.0)
    layer.register_module("more", None)
    assert sole_call(copy.deepcopy(layer), LoRALinear) and not sole_call(layer, nn.Linear)
