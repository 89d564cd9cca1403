"""The decode step after the newest one, begun before the host has read that one's tokens.

A token goes from one step into the next on the device, so the GPU does not wait while the host reads tokens, tells
them, and puts the next rows together. A reply that ends with such a token has one row too many, which is cut off again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..models.kv_rows import Ring
from .decode_step import Row
from .engine import Decoded, Engine
from .turns import Turn


class Ahead:
    """
    Args:
        engine: which records decode steps; without, nothing is begun ahead.

    Attributes:
        begun: how many steps were.
    """

    def __init__(self, engine: Engine):
        self.engine, self.begun = engine, 0
        rings = [group for group in engine.cache.groups if isinstance(group, Ring)]
        self._may = engine.decoding is not None and all(ring.size > ring.reach for ring in rings)
        self._turns: list[Turn] = []
        self._decoded: Decoded | None = None

    @torch.no_grad()
    def begin(self, turns: Sequence[Turn], tokens: Tensor) -> None:
        """Serve one more row of each of these turns, all that decode, whose tokens [n] the device has just chosen.

        Nothing is begun where steps are not recorded (the host is what they wait for), where a turn ends with its token
        anyway or the host has to see the token first (a grammar), where turns serve under several sets of adapters,
        and for want of pages.
        """
        engine, step = self.engine, self.engine.decoding
        keys = {turn.slot.key for turn in turns}
        if not self._may or step is None or step.off or len(keys) != 1 or not all(map(self._goes_on, turns)):
            return
        ends = {turn.slot.id: len(turn.slot.tokens) + 1 for turn in turns}
        if not engine.fits(ends):
            return
        (key,), counts = keys, [(turn.slot.id, 1) for turn in turns]
        rows = [Row(turn.slot.id, len(turn.slot.tokens), (0,)) for turn in turns]
        engine.cache.reserve(counts)
        served = step(rows, key, engine.bank.layers(key), lambda: engine.bank.serving(key), tokens)
        engine.cache.grow(counts)
        self._turns, self._decoded = list(turns), Decoded(served.logits, None, served.likeliest)
        self.begun += 1

    def _goes_on(self, turn: Turn) -> bool:
        """Whether a turn whose newest token is not told yet wants another one behind it, unless that one is a stop."""
        said = len(turn.reply) + 1
        room = len(turn.prompt) + said <= self.engine.window
        return turn.sampler.matcher is None and said < turn.ticket.request.max_new_tokens and room

    def told(self) -> None:
        """The tokens of the rows begun ahead are the newest of their replies now; of replies that ended with them the
        rows are cut off."""
        for turn in self._turns:
            turn.slot.tokens.append(turn.reply[-1])
            if turn.why is not None:
                self.engine.cut(turn.slot.id, len(turn.slot.tokens) - 1)

    def take(self, running: Mapping[int, Turn]) -> tuple[Decoded | None, list[Turn]]:
        """What was begun ahead, of the turns among it that still run; None and no turns where nothing was."""
        turns, decoded = self._turns, self._decoded
        self.drop()
        at = [i for i, turn in enumerate(turns) if turn.why is None and running.get(turn.slot.id) is turn]
        if decoded is None or not at:
            return None, []
        if len(at) == len(turns):
            return decoded, turns
        wanted = torch.tensor(at, device=decoded.logits.device)
        return Decoded(decoded.logits[wanted], None, decoded.likeliest[wanted]), [turns[i] for i in at]

    def drop(self) -> None:
        """Forget what was begun; its rows stay what their slots hold."""
        self._turns, self._decoded = [], None
