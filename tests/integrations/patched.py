"""What the tests of riftco.patch share: a plain and a patched model, batches, and how they are compared."""

from __future__ import annotations

import copy

import torch
from tiny_models import hf_model

import riftco

T = 20
TOLERANCE = 1e-5  # of the loss; float32
GRAD_TOLERANCE = 1e-4  # of each parameter's largest gradient
KINDS = ("full", "left", "right", "holes", "packed")


def pair(family: str, **options):
    """The same random model twice: as transformers made it, and patched."""
    plain = hf_model(family)
    # SDPA gives 0 to rows that see nothing, as riftco does; it has no softcap
    plain.set_attn_implementation("eager" if family == "gemma2" else "sdpa")
    patched = copy.deepcopy(plain)
    riftco.patch(patched, **options)
    return plain.train(), patched.train()


def batch(kind: str, vocabulary: int = 160) -> dict:
    """Two rows of tokens with labels: padded at the left, at the right, in the middle, packed, or whole."""
    ids = torch.randint(3, vocabulary, (2, T), generator=torch.Generator().manual_seed(1))
    if kind == "packed":
        positions = torch.tensor([[*range(7), *range(13)], [*range(1), *range(10), *range(9)]])
        labels = ids.masked_fill(positions == 0, -100)  # the first token of a document follows another's last
        return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}
    mask = torch.ones_like(ids)
    holes = {"left": [(0, 0, 5)], "right": [(1, 15, T)], "holes": [(1, 7, 9), (0, 0, 3)]}
    for row, start, end in holes.get(kind, ()):
        mask[row, start:end] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)  # eager attention lets padding see everything
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_and_grads(model, inputs: dict, **more) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs, **more).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(plain, patched, inputs: dict, **more) -> None:
    """Loss and every gradient agree."""
    want, grads = loss_and_grads(plain, inputs, **more)
    got, ours = loss_and_grads(patched, inputs, **more)
    assert abs(got - want) <= TOLERANCE * abs(want), f"loss {got} instead of {want}"
    assert grads.keys() == ours.keys()
    assert any(g.abs().max() > 1e-4 for g in grads.values())
    for name, g in grads.items():
        off = (ours[name] - g).abs().max()
        assert off <= GRAD_TOLERANCE * max(g.abs().max(), 1e-6), f"gradient of {name}: off by {off} of {g.abs().max()}"
