"""What requests may hold. Fields that riftco does not know are let through where clients send them anyway, and named
in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..sampling import Sampling
from .errors import ApiError

log = logging.getLogger(__name__)
MOST_CHOICES = 128  # of a request, as OpenAI has it


def _unsupported(given: Any) -> None:
    if given is not None:
        raise ValueError("not supported here; leave it out")


Unsupported = Annotated[Any, AfterValidator(_unsupported)]  # what would change an answer, and is not let through


class Words(BaseModel):
    """What may be repeated in an answer."""

    @model_validator(mode="before")
    @classmethod
    def characters(cls, given: Any) -> Any:
        """Half of a surrogate pair is valid JSON, and no text that can be answered with."""
        for name, value in given.items() if isinstance(given, dict) else ():
            try:
                f"{name}{value if isinstance(value, str) else ''}".encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name!a} holds half of a surrogate pair, which is no character") from None
        return given


class Unread:
    """Names fields that nothing reads in the log, each once, so that a misspelt one is found; clients send many that
    change nothing here. The first `most` only: who sends requests does not fill the log."""

    def __init__(self, most: int):
        self.most, self.told = most, set[tuple[str, str]]()

    def tell(self, kind: str, names: Iterable[str]) -> None:
        for name in names:
            if len(self.told) >= self.most:
                return
            if (kind, name[:64]) not in self.told:
                self.told.add((kind, name[:64]))
                log.warning("%s: field %r is not read", kind, name[:64])
                if len(self.told) == self.most:
                    log.warning("further fields that are not read are not named")


unread = Unread(512)


class Body(Words):
    model_config = ConfigDict(extra="allow", strict=False)

    @model_validator(mode="after")
    def told(self) -> Body:
        unread.tell(type(self).__name__, self.model_extra or ())
        return self


class LoraUse(Words):
    """An adapter at a scale."""

    id: str
    scale: float = 1.0


class LearnOptions(Words):
    """Learn this turn: its own reply, or `reply` in its place.

    id: a learn id of the client's: sent twice, it is learned once.
    """

    model_config = ConfigDict(extra="forbid")

    lora_id: str
    lr: float = Field(gt=0, allow_inf_nan=False)
    reply: str | None = None
    reply_tokens: list[int] | None = None
    id: str | None = Field(default=None, max_length=200)
    dry_run: bool = False


class Sampled(Body):
    """Options of sampling that every dialect shares."""

    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    repeat_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    lora: list[LoraUse] | None = None
    id_slot: int | None = None
    learn: LearnOptions | None = None

    def sampling(self, logprobs: int | None = None, temperature: float = 1.0) -> Sampling:
        """`temperature` is the dialect's default."""
        return Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or self.repeat_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            logprobs=logprobs,
        )


class StreamOptions(Body):
    include_usage: bool = False


ReasoningFormat = Literal["auto", "deepseek", "none"]  # llama.cpp's words; none: thoughts stay in the text


class Calls(Sampled):
    """Tools, as both of OpenAI's ways to chat have them."""

    reasoning_format: ReasoningFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ChatRequest(Calls):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False
    functions: Unsupported = None
    function_call: Unsupported = None


class CompletionRequest(Sampled):
    """POST /v1/completions"""

    prompt: str | list[Any]
    model: str | None = None
    max_tokens: int | None = Field(default=16, ge=1)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: Literal[False] = False
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    best_of: Unsupported = None
    suffix: Unsupported = None

    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        given = self.prompt
        if isinstance(given, str) or (given and all(type(one) is int for one in given)):
            return [given]
        if not given or not all(isinstance(one, str) or _ids(one) for one in given):
            raise ApiError(400, "prompt must be a text, token ids, or a list of such", param="prompt")
        return list(given)


def _ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int for one in given)


def stops_of(stop: str | list[str] | None) -> list[str]:
    return [] if stop is None else [stop] if isinstance(stop, str) else stop
