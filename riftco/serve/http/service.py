"""What every dialect asks of the engine, once: prompts, turns, learning, adapters."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...adapters import AdapterError
from ...data import DataError, check_options
from ...models import ModelError, Tokenizer
from ..batch import Refused
from ..conversation import reply_tokens, serving_prompt_tokens
from ..engine import Engine
from ..grammar import Grammar, Grammars
from ..learner import LearnOutcome
from ..requests import Finished, Request, Teach, Ticket
from ..sampling import Sampling
from ..scheduler import LEARN_DUTY, Scheduler
from ..thoughts import Thoughts, thoughts_of
from .errors import ApiError
from .models import LearnOptions, LoraUse

READERS = 4  # threads that turn texts into tokens
LEARNERS = 64  # threads of learns, which wait there for their time and hold up nothing else
T = TypeVar("T")
REMEMBERED = 1024  # learn ids whose outcome is kept for a client that asks again


@dataclass(frozen=True)
class Limits:
    """What one caller may ask for: tokens of a reply or an example to learn, learns a minute, waiting requests."""

    reply_tokens: int = 4096
    train_tokens: int = 4096
    learns_per_minute: int = 60
    queue: int = 256


class Service:
    """An engine behind HTTP.

    Args:
        engine, tokenizer: what serves.
        name: the model's, in answers.
        learns: whether learning is offered at all (a folder for what is learned was given).
        limits: caps.
        duty: the part of the time that learning may take while others are served.
        template: options of the chat template where a request gives none.
        reasoning: whether a reply's thoughts are told from its answer where a request does not say.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        name: str,
        learns: bool = False,
        limits: Limits | None = None,
        speculate: int = 0,
        duty: float = LEARN_DUTY,
        template: Mapping[str, Any] | None = None,
        reasoning: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.template, self.reasoning = dict(template or {}), reasoning
        check_options(self.template)
        self.engine, self.tokenizer, self.name, self.learns = engine, tokenizer, name, learns
        self.limits = limits or Limits()
        self.grammars = Grammars(tokenizer, engine.model.config.vocab_size)
        self.scheduler = Scheduler(engine, queue=self.limits.queue, duty=duty, speculate=speculate)
        self.requests, self.created, self._clock = 0, int(time.time()), clock
        self.scales: dict[str, float] = {}  # adapters that serve whoever names none
        self._recent: deque[float] = deque()
        self._known: OrderedDict[str, LearnOutcome | None] = OrderedDict()  # None: under way
        self._lock, self._next_to_learn = threading.Lock(), threading.Lock()
        self._readers = ThreadPoolExecutor(READERS, "riftco-text")
        self._learners = ThreadPoolExecutor(LEARNERS, "riftco-learn")

    async def away(self, what: Callable[..., T], *arguments: Any) -> T:
        """Run what a long text makes long (megabytes take seconds) without holding up other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, what, *arguments)

    async def learned(self, slot: int, prompt: list[int], options: LearnOptions, caller: str) -> LearnOutcome:
        """`learn`, on a thread of its own kind."""
        return await asyncio.get_running_loop().run_in_executor(
            self._learners, self.learn, slot, prompt, options, caller
        )

    def prompt_of(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], go_on: bool = False
    ) -> list[int]:
        """The tokens that a conversation is served with, and learned behind; `go_on`: with its last message."""
        try:
            check_options(options)
        except DataError as why:
            raise ApiError(400, str(why), param="chat_template_kwargs") from None
        try:
            return serving_prompt_tokens(self.tokenizer, messages, go_on, **{**self.template, **options})
        except (ModelError, Refused) as why:
            raise ApiError(400, str(why), param="messages") from None

    def tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        """A completion's prompt: text, or tokens."""
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        except ModelError as why:
            raise ApiError(400, str(why), param="prompt") from None

    def thoughts(self, ticket: Ticket, format: str | None, begun: str = "") -> Thoughts | None:
        """What tells a reply's thoughts from its answer; None: all is text. What keeps to a grammar has no thoughts.
        `begun`: the text that the reply goes on with."""
        asked = self.reasoning if format is None else format != "none"
        grammar = ticket.request.grammar
        if not asked or (grammar is not None and grammar.whole):
            return None
        return thoughts_of(self.tokenizer, ticket.request.prompt, begun)

    def submit(
        self,
        prompt: list[int],
        sampling: Sampling,
        max_new_tokens: int | None,
        *,
        lora: Sequence[LoraUse] | None = None,
        slot: int | None = None,
        learn: LearnOptions | None = None,
        caller: str = "",
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        refuse: Callable[[Sequence[int]], str | None] | None = None,
    ) -> Ticket:
        """Queue a turn; what can never run is refused at once. `refuse`: why a reply is not to be learned, if so."""
        window = self.engine.window
        if len(prompt) > window:
            raise ApiError(
                400, f"the prompt has {len(prompt)} tokens; the context holds {window}", code="context_length_exceeded",
                n_prompt_tokens=len(prompt), n_ctx=window,
            )  # fmt: skip
        if learn is not None and learn.dry_run:
            raise ApiError(
                400, "dry_run is an option of POST /learn; a turn's lesson is learned", param="learn.dry_run"
            )
        id, known = None if learn is None else learn.id, None
        if id is not None:
            known = self.claim(id)
        teach = None if learn is None or known is not None else self._claimed(id, learn, caller)
        if teach is not None:
            teach = replace(teach, refuse=refuse)
        request = Request(
            prompt,
            max_new_tokens=window if max_new_tokens is None else max_new_tokens,
            sampling=sampling,
            stop_ids=() if ignore_eos else self.tokenizer.stop_ids,
            adapters=self.adapters_of(lora),
            slot=None if slot is None or slot < 0 else slot,
            teach=teach,
            grammar=grammar,
        )

        def on_end(finished: Finished) -> None:
            if teach is not None and id is not None:
                self.settle(id, finished.learn)

        try:
            ticket = self.scheduler.submit(request, on_end)
        except Refused as why:
            self.settle(id, known)
            busy = "wait already" in str(why)
            raise ApiError(503 if busy else 400, str(why), retry=busy) from None
        ticket.known = known
        self.requests += 1
        return ticket

    def _claimed(self, id: str | None, learn: LearnOptions, caller: str) -> Teach:
        try:
            return self.teach(learn, caller)
        except ApiError:
            self.settle(id, None)
            raise

    def lora_of(self, lora: Sequence[LoraUse] | None, model: str | None) -> Sequence[LoraUse] | None:
        """The adapters that a request names: its `lora`, or else its `model` where that is one's id."""
        if lora is None and model in self.engine.bank.adapters and model != self.name:
            return [LoraUse(id=model)]
        return lora

    def adapters_of(self, lora: Sequence[LoraUse] | None) -> dict[str, float]:
        return dict(self.scales) if lora is None else {use.id: use.scale for use in lora}

    def teach(self, learn: LearnOptions, caller: str) -> Teach:
        """A request's learn option as the scheduler takes it; one set of refusals for every route."""
        self.may_learn()
        reply = learn.reply_tokens
        if learn.reply is not None:
            try:
                reply = reply_tokens(self.tokenizer, {"role": "assistant", "content": learn.reply})
            except (Refused, ModelError) as why:
                raise ApiError(400, str(why), param="learn.reply") from None
        if reply is not None and len(reply) > self.limits.reply_tokens:
            raise ApiError(400, f"a learned reply has at most {self.limits.reply_tokens} tokens; got {len(reply)}")
        note = {"learn_id": learn.id or uuid.uuid4().hex, "caller": caller}
        return Teach(learn.lora_id, learn.lr, reply, note)

    def needs_learning(self) -> None:
        if not self.learns:
            raise ApiError(404, "this server does not learn: start it with --train-dir", code="learning_disabled")

    def slot_of(self, prompt: list[int]) -> int:
        """The slot that served this prompt: the one that holds most of it."""
        slots = self.engine.slots
        return max(slots, key=lambda s: s.common(prompt, s.key)).id

    def may_learn(self) -> None:
        self.needs_learning()
        now = self._clock()
        while self._recent and now - self._recent[0] > 60:
            self._recent.popleft()
        if len(self._recent) >= self.limits.learns_per_minute:
            raise ApiError(429, f"at most {self.limits.learns_per_minute} learns a minute; try again later", retry=True)
        self._recent.append(now)

    def claim(self, id: str) -> LearnOutcome | None:
        """The outcome of the learn that this id was given for before; else it is this caller's from now on.

        Raises:
            ApiError: that learn is under way; asked again later, its outcome is there.
        """
        with self._lock:
            if id in self._known:
                outcome = self._known[id]
                if outcome is None:
                    raise ApiError(503, f"the learn {id!r} is under way; ask again", retry=True)
                return outcome
            self._known[id] = None
            return None

    def settle(self, id: str | None, outcome: LearnOutcome | None) -> None:
        """What became of a claimed learn; a refusal, or None, gives the id free again: nothing was learned."""
        if id is None:
            return
        with self._lock:
            if outcome is None or not outcome.success:
                self._known.pop(id, None)
                return
            self._known[id] = outcome
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    def learn(self, slot: int, prompt: list[int], options: LearnOptions, caller: str) -> LearnOutcome:
        """Learn a reply behind the prompt that a slot served, once the duty cycle lets it. Blocks: call it on a thread.

        A dry run learns nothing, so that its id stays free.
        """
        id = None if options.dry_run else options.id
        if id is not None and (before := self.claim(id)) is not None:
            return before
        outcome = None
        try:
            teach = self.teach(options, caller)
            if not teach.reply:
                raise ApiError(400, "a learn needs a reply", param="reply")
            with self._next_to_learn:  # those who wait together would all go on at the same moment
                self.scheduler.duty.wait()
                outcome = self.scheduler.learn(
                    slot, prompt, list(teach.reply), teach.adapter, teach.lr, note=teach.note, dry_run=options.dry_run
                )
            return outcome
        finally:
            self.settle(id, outcome)

    def change(self, what: Callable[[], Any]) -> Any:
        """Run something that changes adapters or slots between two iterations; refusals become 400."""
        with self.scheduler.settled():
            try:
                return what()
            except (Refused, AdapterError, ModelError) as why:
                raise ApiError(400, str(why)) from None

    def adapter_cards(self) -> list[dict[str, Any]]:
        cards = []
        for id, adapter in sorted(self.engine.bank.adapters.items()):
            pupil = self.engine.learner.pupils.get(id)
            cards.append({
                "id": id, "version": adapter.version, "digest": adapter.digests[-1], "rank": adapter.spec.rank,
                "step": 0 if pupil is None else pupil.step, "undoable": 0 if pupil is None else len(pupil.journal),
                "scale": self.scales.get(id, 0.0), "promotable": self.engine.bank.promotable(id),
            })  # fmt: skip
        return cards


def outcome_json(outcome: LearnOutcome) -> dict[str, Any]:
    """A learn's outcome as clients read it: what is not known is left out."""
    fields = {name: getattr(outcome, name) for name in LearnOutcome.__dataclass_fields__}
    return {name: value for name, value in fields.items() if value is not None}
