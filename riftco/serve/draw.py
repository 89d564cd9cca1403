"""Tokens of several rows at once, drawn on the device. A row's draw comes from its own generator, and does not depend
on the rows beside it.

n rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .host import sent

if TYPE_CHECKING:
    from .sampling import Sampler, Sampling

COLDEST = 1e-30  # no colder than float32 can divide by: nothing overflows on the way to 0


def choose(samplers: Sequence[Sampler], logits: Tensor) -> Tensor:
    """A token [n] for each row of logits [n, V], as its sampler has it; it counts as generated from now on."""
    x = logits.to(torch.float32, copy=True)
    for i, (sampler, row) in enumerate(zip(samplers, x.unbind())):
        adjusted = sampler.adjusted(row)
        if adjusted is not row:
            x[i] = adjusted
    tokens = draw(x, [sampler.options for sampler in samplers], [sampler.generator for sampler in samplers])
    for sampler, token in zip(samplers, tokens.split(1)):
        sampler.count(token)
    return tokens


def draw(x: Tensor, options: Sequence[Sampling], generators: Sequence[torch.Generator]) -> Tensor:
    """A token [n] for each row of adjusted logits [n, V], float32."""
    V = x.shape[1]
    cold = [o.temperature == 0 for o in options]
    if all(cold):
        return x.argmax(-1)
    tops = [0 if c or o.top_k >= V else o.top_k for c, o in zip(cold, options)]
    masses = [o.top_p if o.top_p < 1 and not c else math.inf for c, o in zip(cold, options)]
    columns: list[list[float]] = [
        [max(o.temperature, COLDEST) for o in options],
        [math.log(o.min_p) if o.min_p else -math.inf for o in options],
        masses,
        [float(k) for k in tops],
    ]
    temperature, least, mass, k = sent(columns, torch.float32, x.device).unsqueeze(-1).unbind()
    if any(tops):
        kth = x.topk(max(tops)).values.gather(-1, k.long().sub(1).clamp(min=0))
        x = x.masked_fill((x < kth) & (k > 0), -torch.inf)
    x = (x - x.amax(-1, keepdim=True)) / temperature  # below the largest
    probs = x.masked_fill(x < least, -torch.inf).softmax(-1)
    if any(m < math.inf for m in masses):
        ordered, index = probs.sort(descending=True, stable=True)
        # the token that crosses top_p still counts
        probs = torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(_summed(ordered) - ordered >= mass, 0.0))
    # the exponential race: one draw a token, so that a generator moves alike whatever was cut
    noise = torch.empty_like(probs)
    for row, is_cold, generator in zip(noise, cold, generators):
        if is_cold:
            row.fill_(1.0)
        else:
            row.exponential_(generator=generator)
    return (probs / noise).argmax(-1)


def _summed(ordered: Tensor) -> Tensor:
    """Cumulative sums of rows. A single one would be summed by another kernel, in another order."""
    return ordered.cumsum(-1) if len(ordered) > 1 else torch.cat([ordered, ordered]).cumsum(-1)[:1]
