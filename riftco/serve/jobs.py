"""Files of chats and texts that an adapter learns in the background, step by step between the iterations of serving.

A step is a learn like any other: logged, undoable, on disk before the next one. It holds the engine for its own time,
so a request waits for one step at most; between steps the duty cycle leaves nine tenths of the time to who is served.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data import Example
from ..train.duty import SLICE
from .batch import UNLABELLED, Refused
from .learner import LearnOutcome
from .scheduler import Scheduler

log = logging.getLogger(__name__)
PAUSE = 0.002  # seconds between steps in which whoever waits for the engine gets it first
LOSSES = 1000  # newest losses of a job that are told


@dataclass
class Job:
    """What is trained, and how far it is.

    Attributes:
        status: "queued", "running", "done", "cancelled" or "failed" (`reason` says why).
        losses: of the newest steps, each before it.
    """

    examples: Sequence[Example]
    adapter: str
    lr: float
    epochs: int = 1
    batch_size: int = 1
    seed: int = 0
    caller: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: str = "queued"
    reason: str | None = None
    step: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES))
    created: float = field(default_factory=time.time)
    ended: float | None = None
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self.epochs * -(-len(self.examples) // max(self.batch_size, 1))

    @property
    def over(self) -> bool:
        return self.status in ("done", "cancelled", "failed")

    def batches(self) -> Iterator[list[Example]]:
        """Every example once an epoch, in an order of the epoch's own."""
        order = list(self.examples)
        shuffle = random.Random(self.seed).shuffle
        for _ in range(self.epochs):
            shuffle(order)
            for at in range(0, len(order), self.batch_size):
                yield order[at : at + self.batch_size]


class Over(Exception):
    """A job ended before its next step began."""


class Jobs:
    """Trains jobs one after the other, on a thread of its own.

    Args:
        scheduler: its engine learns; its duty cycle says when.
        queue: how many jobs may wait.
        kept: how many that have ended can still be asked about.
    """

    def __init__(self, scheduler: Scheduler, *, queue: int = 8, kept: int = 64):
        self.scheduler, self.queue, self.kept = scheduler, queue, kept
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Job) -> Job:
        """Queue a job.

        Raises:
            Refused: there is no such adapter, nothing to train on, too many wait, or this is closed.
        """
        engine = self.scheduler.engine
        engine.bank.of(job.adapter)
        low, high = engine.learner.lr_range
        if not low <= job.lr <= high:
            raise Refused(f"lr must be between {low:g} and {high:g}; got {job.lr!r}")
        if not job.examples or job.epochs < 1 or job.batch_size < 1:
            raise Refused("a job needs examples, and epochs and batch_size of at least 1")
        with self._changed:
            if self._closed:
                raise Refused("the server is stopping")
            if sum(j.status == "queued" for j in self.jobs.values()) >= self.queue:
                raise Refused(f"{self.queue} jobs wait already; try again later")
            self.jobs[job.id] = job
            ended = [id for id, j in self.jobs.items() if j.over]
            for id in ended[: max(0, len(ended) - self.kept)]:
                del self.jobs[id]
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="riftco-train", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return job

    def of(self, id: str) -> Job:
        with self._changed:
            if id not in self.jobs:
                raise Refused(f"no job {id!r}")
            return self.jobs[id]

    def all(self) -> list[Job]:
        with self._changed:
            return list(self.jobs.values())

    def cancel(self, id: str) -> Job:
        """End a job after the step that it is at; what it learned so far stays."""
        job = self.of(id)
        with self._changed:
            if not job.over:
                self._end(job, "cancelled")
        return job

    def close(self) -> None:
        """Cancel everything, and wait for the step under way."""
        with self._changed:
            self._closed = True
            for job in self.jobs.values():
                if not job.over:
                    self._end(job, "cancelled", "the server stopped")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _end(self, job: Job, status: str, reason: str | None = None) -> None:
        job.status, job.reason, job.ended, job.examples = status, reason, time.time(), ()
        self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (job := next((j for j in self.jobs.values() if j.status == "queued"), None)):
                    if self._closed:
                        return
                    self._changed.wait()
                job.status = "running"
            try:
                reason = self._train(job)
            except Exception as why:  # the step was taken back; the next job may do better
                log.exception("job %s failed at step %d", job.id, job.step)
                reason = f"{type(why).__name__}: {why}"
            with self._changed:
                if not job.over:
                    self._end(job, "done" if reason is None else "failed", reason)

    def _train(self, job: Job) -> str | None:
        """Take a job's steps until it is over; what a step was refused for."""
        for examples in job.batches():
            self._wait_for_time(job)
            texts = [labelled(e) for e in examples]
            try:
                outcome = self.scheduler.apart(partial(self._step, job, texts))
            except Over:
                return None
            if not outcome.success:
                return outcome.reason
            assert outcome.loss_before is not None
            job.step += 1
            job.losses.append(outcome.loss_before)
        return None

    def _step(self, job: Job, texts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> LearnOutcome:
        if job.over:
            raise Over
        scheduler, note = self.scheduler, {"learn_id": job.id, "job": job.id, "caller": job.caller}
        began = scheduler.clock()
        outcome = scheduler.engine.study(texts, adapter=job.adapter, lr=job.lr, note=note, wait=False)
        scheduler.worked(scheduler.clock() - began)
        return outcome

    def _wait_for_time(self, job: Job) -> None:
        """Let others have the engine, and return once the duty cycle lets the next step begin, or the job is over."""
        scheduler, duty = self.scheduler, self.scheduler.duty
        time.sleep(PAUSE)
        while not job.over and ((scheduler.waiting and not scheduler.turns) or (duty.debt and duty.busy())):
            time.sleep(min(max(duty.debt, PAUSE), SLICE))


def labelled(example: Example) -> tuple[Tensor, Tensor, Tensor | None]:
    """(tokens, labels, weights) [T - 1]: what follows each token, where it is to be learned."""
    ids, weights = torch.tensor(example.ids), torch.tensor(example.weights)[1:]
    label = ids[1:].where(weights > 0, UNLABELLED)
    return ids[:-1], label, None if bool((weights[weights > 0] == 1).all()) else weights


def steps_of(job: Job) -> dict[str, Any]:
    """A job as clients read it."""
    return {
        "id": job.id, "object": "train.job", "status": job.status, "reason": job.reason, "lora_id": job.adapter,
        "lr": job.lr, "epochs": job.epochs, "batch_size": job.batch_size, "step": job.step, "steps": job.steps,
        "losses": list(job.losses), "created": int(job.created),
        "seconds": (job.ended or time.time()) - job.created,
    }  # fmt: skip
