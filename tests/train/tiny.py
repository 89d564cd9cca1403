"""A model small enough to train in a test, and torch's Adam behind riftco.optim.Adam's interface."""

import torch
import torch.nn.functional as F

from riftco.data import Example, Loader, pack

VOCABULARY = 13


class TinyModel(torch.nn.Module):
    """Predicts from the token and its position; dropout draws from torch's generator."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.place = torch.nn.Embedding(32, width)
        self.dropout = torch.nn.Dropout(dropout)
        self.lm_head = torch.nn.Linear(width, VOCABULARY)

    def hidden(self, input_ids, *, positions, cu_seqlens, max_seqlen):
        return self.dropout(torch.tanh(self.embed(input_ids) + self.place(positions)))

    def logits(self, hidden):
        return self.lm_head(hidden)

    def loss(self, input_ids, target, row_weight=None, n_labelled=None, denominator=None, **where):
        logits = self.lm_head(self.hidden(input_ids, **where))
        losses = F.cross_entropy(logits, target.long(), reduction="none", ignore_index=-100)
        if row_weight is not None:
            losses = losses * row_weight
        return losses.sum() / denominator


class ClippedAdamW(torch.optim.AdamW):
    """step() returns (gradient norm, clip scale) and writes nothing when the norm is not finite."""

    def __init__(self, params, gradient_clip=1.0, **options):
        super().__init__(params, foreach=False, **options)
        self.gradient_clip = gradient_clip

    def step(self):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params]))
        scale = torch.clamp(self.gradient_clip / norm, max=1.0)
        if norm.isfinite():
            for p in params:
                p.grad.mul_(scale)
            super().step()
        return norm, scale


def examples(count=12, seed=0):
    """Sequences that count upwards: learnable from token and position."""
    gen = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        start, length = (int(torch.randint(a, b, (), generator=gen)) for a, b in ((0, VOCABULARY), (4, 9)))
        ids = tuple((start + k) % VOCABULARY for k in range(length))
        made.append(Example(ids, (0.0, *[1.0] * (length - 1)), line=i + 1))
    return made


def parts(*, dropout=0.0, tokens=20, seed=0, epochs=None, data=None, clip=1.0, lr=0.05):
    """(model, optimizer, loader), the same every time."""
    torch.manual_seed(7)
    model = TinyModel(dropout=dropout)
    optimizer = ClippedAdamW(model.parameters(), gradient_clip=clip, lr=lr, weight_decay=0.0)
    return model, optimizer, Loader(data or examples(), tokens, seed, epochs)


def packed(lengths, weight=1.0):
    """One micro-batch of documents of so many rows."""
    return pack([Example(tuple(range(n + 1)), (0.0, *[weight] * n), line=1) for n in lengths])
