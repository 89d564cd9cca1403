"""One model, one learning adapter and one conversation: what `riftco chat` opens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..adapters import LoraSpec
from ..models import base_digest
from ..train.use import load_to_serve
from .adopt import adopt, weights_for
from .conversation import Chat
from .engine import Engine
from .scheduler import Scheduler
from .store import Store


@dataclass
class Talk:
    engine: Engine
    scheduler: Scheduler
    adapter: str  # its id
    chat: Chat
    system: str | None
    held: str  # how the base's weights are

    def restart(self) -> None:
        self.chat = Chat(
            self.scheduler, self.chat.tokenizer, adapter=self.adapter, system=self.system, template=self.chat.template
        )

    def promote(self) -> int:
        with self.scheduler.settled():
            return self.engine.promote(self.adapter)

    def undo(self, steps: int) -> int:
        with self.scheduler.settled():
            return self.engine.undo(self.adapter, steps)

    def close(self) -> None:
        self.scheduler.close()
        if self.engine.store is not None:
            self.engine.store.close()


def open_chat(
    path: str,
    *,
    train_dir: str | None = None,
    rank: int = 8,
    window: int | None = None,
    cache: str = "q8_0",
    weights: str = "auto",
    device: str = "auto",
    system: str | None = None,
    tuned: str | None = None,
    adapter: str = "live",
    template: Mapping[str, Any] | None = None,
) -> Talk:
    """Load a model; its adapter is that of this id in `train_dir`, or a new one, which begins as the PEFT folder
    `tuned`."""
    loaded, held = load_to_serve(path, weights=weights_for(tuned, weights), device=device)
    store = None if train_dir is None else Store(train_dir, base_digest(path), path)
    longest = loaded.model.config.max_position_embeddings
    engine = Engine(loaded.model, window=min(window or 4096, longest), cache_dtype=cache, store=store)
    if tuned is not None:
        adopt(engine, adapter, tuned)
    elif adapter not in engine.bank.adapters:
        engine.create(adapter, LoraSpec(rank=rank, alpha=2.0 * rank))
    scheduler = Scheduler(engine)
    scheduler.start()
    talk = Chat(scheduler, loaded.tokenizer, adapter=adapter, system=system, template=template)
    return Talk(engine, scheduler, adapter, talk, system, held)
