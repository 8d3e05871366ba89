"""Events and exchanges: an Event is what a product reports of a user, an Exchange what the server recorded.

    Exchange   one answer as it was sampled: tokens, log-probabilities, policy, propensity
    Event      one act of a user on an answer, joined to its exchange by ``response_id``

Events are append-only and idempotent by ``event_id``. Times are seconds since 1970: ``ts`` is by the client's
clock and decides windows and splits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ostinato.apps.serve.calls import Name

MAX_TEXT = 65_536  # characters of a text that a user wrote
LONGEST_S = 31 * 86_400.0  # of a dwell


class Kind(StrEnum):
    """The act of a user."""

    SHOWN = "shown"
    ACCEPT = "accept"
    REJECT = "reject"
    EDIT = "edit"  # ``after``: the text that the user made of it
    UNDO = "undo"
    REGENERATE = "regenerate"  # the answer that replaces it names it as ``replaces``
    COPY = "copy"
    RUN_OK = "run_ok"
    RUN_FAIL = "run_fail"
    TASK_DONE = "task_done"
    ABANDON = "abandon"
    RETURN_VISIT = "return_visit"
    CANCEL = "cancel"
    RATING = "rating"  # ``value`` from -1 (thumb down) to 1 (thumb up)
    COMMENT = "comment"
    DWELL = "dwell"  # ``value`` in seconds


class Action(StrEnum):
    """The act of the policy, from its output alone. Every action has a reward."""

    ANSWER = "answer"
    QUESTION = "question"  # a question back instead of an answer
    REFUSAL = "refusal"
    INVALID = "invalid"  # a tool call that failed or cannot be read, output that does not parse
    EMPTY = "empty"


class Exposure(BaseModel):
    """How an answer was presented to its user. ``propensity``: the probability that this answer was shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=0, ge=0)
    alternatives: tuple[Name, ...] = ()  # response ids that were shown beside it
    arm: Name = ""  # of an experiment
    propensity: float = Field(default=1.0, gt=0, le=1)


class Event(BaseModel):
    """One event of a user on an answer. Unknown fields and kinds are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    event_id: Annotated[Name, Field(min_length=1)]
    response_id: Annotated[Name, Field(min_length=1)]
    kind: Kind
    ts: float = Field(gt=0, lt=1e11)
    user: Name = ""  # a pseudonym
    session: Name = ""
    tenant: Name = ""
    value: float | None = None
    text: str = Field(default="", max_length=MAX_TEXT)  # a comment, a reason
    after: str | None = Field(default=None, max_length=MAX_TEXT)  # of an edit: the whole text behind it
    replaces: Name = ""  # of an answer that is shown: the answer before it
    exposure: Exposure = Exposure()
    consent: bool = True  # False: the answer is kept out of training
    personal: bool = False  # holds personal data: counted apart

    @field_validator("value")
    @classmethod
    def _check_finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("use a finite number")
        return value


def parse_event(document: Mapping[str, Any]) -> Event:
    """Return the event of a JSON object. Raises ValueError with one sentence that names the field and the
    fault."""
    try:
        event = Event.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "event"
        if first["type"] == "missing":
            raise ValueError(f"{where} is missing; an event has event_id, response_id, kind and ts") from None
        raise ValueError(f"{where} is {first.get('input')!r:.80}: {first['msg']}") from None
    if event.kind is Kind.EDIT and event.after is None:
        raise ValueError("after is missing; an edit gives the whole text that the user made of the answer")
    if event.kind in (Kind.RATING, Kind.DWELL) and event.value is None:
        raise ValueError(f"value is missing; a {event.kind} has one")
    if event.kind is Kind.RATING and not -1 <= (event.value or 0) <= 1:
        raise ValueError(f"value is {event.value}; a rating is from -1 (worst) to 1 (best)")
    if event.kind is Kind.DWELL and not 0 <= (event.value or 0) <= LONGEST_S:
        raise ValueError(f"value is {event.value}; a dwell has from 0 to {LONGEST_S:g} seconds, a month")
    return event


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """An answer as the server sampled it. T tokens of output behind P of prompt."""

    response_id: str
    ts: float
    model: str  # by the name that the client used
    revision: str  # of the adapter: the policy that answered
    messages: tuple[Mapping[str, Any], ...]  # the prompt as a chat; one user message for a plain one
    output: str  # decoded
    action: Action
    prompt_tokens: np.ndarray  # [P] int32
    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, under the distribution that was sampled from
    experts: np.ndarray | None = None  # [P + T, moe layers, top_k]: the routes, where they were recorded
    sampling: Mapping[str, Any] = field(default_factory=dict)
    user: str = ""
    session: str = ""
    tenant: str = ""
    arm: str = ""  # of an experiment, as canary or control
    propensity: float = 1.0  # with which this policy was chosen
