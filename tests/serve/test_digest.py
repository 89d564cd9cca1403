"""An adapter's digest: of its content alone, and of all of it."""

import torch

from riftco.serve.bank import digest


def state():
    generator = torch.Generator().manual_seed(0)
    return {f"{i}.lora_{part}.weight": torch.randn(4, 6, generator=generator) for i in range(3) for part in "AB"}


def test_it_is_of_names_shapes_dtypes_and_bytes():
    want, seen = digest(state()), set()
    assert want == digest(dict(reversed(state().items()))), "not of their order"
    strided = {n: torch.stack([t, t], -1)[..., 0] for n, t in state().items()}
    assert want == digest(strided), "not of how they lie in memory"
    name, t = next(iter(state().items()))
    flipped = t.clone()
    flipped.view(torch.uint8)[3, 23] ^= 1
    for other in (flipped, t.view(6, 4), t.double(), t.to(torch.bfloat16), t[:3], torch.zeros(0, 6)):
        seen.add(digest({**state(), name: other}))
    renamed = state()
    renamed["x"] = renamed.pop(name)
    seen |= {digest(renamed), digest({n: u for n, u in state().items() if n != name}), digest({})}
    assert len(seen) == 9 and want not in seen


def test_tensors_that_changed_places_are_another_adapter():
    a, b = list(state())[:2]
    changed = state()
    changed[a], changed[b] = changed[b], changed[a]
    assert digest(changed) != digest(state())
