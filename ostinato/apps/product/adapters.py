"""Feedback of other tools as events: OpenTelemetry's GenAI evaluations, Langfuse scores, LangSmith feedback.

Pure functions of exported rows. An event's id comes from its row, so the same export twice changes nothing.
What has no counterpart is left out, counted by its reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ostinato.apps.product.events import Event, parse_event

Row = Mapping[str, Any]
_GOOD = re.compile("good|positive|pass(ed)?|correct|accept(ed)?|up|thumbs_up|true|yes")
_BAD = re.compile("bad|negative|fail(ed)?|incorrect|reject(ed)?|down|thumbs_down|false|no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Events, and how many rows were left out, by reason."""

    events: tuple[Event, ...] = ()
    skipped: Counter[str] = field(default_factory=Counter)


def from_otel(rows: Iterable[Row]) -> Imported:
    """Events ``gen_ai.evaluation.result`` (semantic-conventions-genai, in development), as log records in
    JSON: ``attributes`` an object or OTLP's list of pairs, ``timeUnixNano`` or ``timestamp``. Joined by
    ``gen_ai.response.id``; a score in [0, 1] becomes a rating in [-1, 1]."""

    def one(row: Row) -> Row:
        attributes = _attributes(row.get("attributes"))
        names = (row.get("eventName"), row.get("name"), attributes.get("event.name"))
        name = next(filter(None, names), None)
        if name != "gen_ai.evaluation.result":
            raise _Skip(f"event {name}")
        if "error.type" in attributes:
            raise _Skip("the evaluation failed")
        nanoseconds = row.get("timeUnixNano") or row.get("time_unix_nano") or row.get("observedTimeUnixNano")
        what = attributes.get("gen_ai.evaluation.name", "")
        score = attributes.get("gen_ai.evaluation.score.value")
        response = attributes.get("gen_ai.response.id")
        span = (row.get("traceId"), row.get("spanId"))
        return {
            "event_id": _id("otel", *span, response, what, nanoseconds, score),
            "response_id": _needed(response, "gen_ai.response.id"),
            "ts": float(nanoseconds) / 1e9 if nanoseconds else _seconds(row.get("timestamp")),
            "session": attributes.get("gen_ai.conversation.id") or attributes.get("session.id") or "",
            "user": attributes.get("user.id") or attributes.get("enduser.pseudo.id") or "",
            "text": attributes.get("gen_ai.evaluation.explanation") or "",
            **_rating(score, attributes.get("gen_ai.evaluation.score.label")),
        }

    return _import(rows, one)


def from_langfuse(rows: Iterable[Row], responses: Mapping[str, str] | None = None) -> Imported:
    """Scores, as Langfuse's API and exports have them: NUMERIC in [0, 1], BOOLEAN, CATEGORICAL by its word.

    A score hangs on an observation or a trace. ``responses``: the response id by that of the observation or
    trace; without it, their ids are taken for response ids (a product that set them so).
    """

    def one(row: Row) -> Row:
        place = row.get("observationId") or row.get("traceId")
        if place is None:
            raise _Skip("a score of a session or a dataset run")
        base = {
            "event_id": _id("langfuse", _needed(row.get("id"), "id")),
            "response_id": _response(responses, row.get("observationId"), row.get("traceId")),
            "ts": _seconds(row.get("timestamp") or row.get("createdAt")),
            "session": row.get("sessionId") or "",
            "user": row.get("userId") or "",
            "text": row.get("comment") or "",
        }
        if row.get("dataType") == "CORRECTION" or row.get("name") == "correction":
            return base | {"kind": "edit", "after": _needed(row.get("stringValue"), "stringValue")}
        return base | _rating(row.get("value"), row.get("stringValue"))

    return _import(rows, one)


def from_langsmith(rows: Iterable[Row], responses: Mapping[str, str] | None = None) -> Imported:
    """Feedback, as LangSmith's API has it: ``score`` in [0, 1], else ``value``; a ``correction`` that is a
    text or has an ``output`` is an edit. ``responses``: as of ``from_langfuse``, by run id or trace id."""

    def one(row: Row) -> Row:
        source = row.get("feedback_source")
        user = source.get("user_id") if isinstance(source, Mapping) else None
        base = {
            "event_id": _id("langsmith", _needed(row.get("id"), "id")),
            "response_id": _response(responses, row.get("run_id"), row.get("trace_id")),
            "ts": _seconds(row.get("created_at")),
            "session": row.get("session_id") or "",
            "user": str(user or ""),
            "text": row.get("comment") or "",
        }
        correction = row.get("correction")
        after = correction.get("output") if isinstance(correction, Mapping) else correction
        if isinstance(after, str) and after:
            return base | {"kind": "edit", "after": after}
        if row.get("score") is None and row.get("value") is None and base["text"]:
            return base | {"kind": "comment"}
        return base | _rating(row.get("score"), row.get("value"))

    return _import(rows, one)


# ---- parts of them


class _Skip(Exception):
    """Why a row has no event."""


def _import(rows: Iterable[Row], one: Callable[[Row], Row]) -> Imported:
    events, skipped = [], Counter[str]()
    for row in rows:
        try:
            if not isinstance(row, Mapping):
                raise _Skip("no JSON object")
            events.append(parse_event(one(row)))
        except _Skip as reason:
            skipped[str(reason)] += 1
        except ValueError as error:
            skipped[f"no event: {str(error).split()[0]}"] += 1
    return Imported(events=tuple(events), skipped=skipped)


def _rating(score: Any, label: Any) -> dict[str, Any]:
    """A rating from -1 to 1 of a score from 0 to 1, or of a word."""
    if isinstance(score, bool):
        return {"kind": "rating", "value": 1.0 if score else -1.0}
    if isinstance(score, int | float):
        if not (math.isfinite(score) and 0 <= score <= 1):
            raise _Skip("a score outside 0 to 1")
        return {"kind": "rating", "value": 2.0 * score - 1.0}
    word = str(label if score is None else score).strip().lower()
    if _GOOD.fullmatch(word) or _BAD.fullmatch(word):
        return {"kind": "rating", "value": 1.0 if _GOOD.fullmatch(word) else -1.0}
    raise _Skip("neither a score nor a known word" if word != "none" else "no score")


def _attributes(given: Any) -> dict[str, Any]:
    """An object, or OTLP's ``[{"key": .., "value": {"stringValue": ..}}]``."""
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, Any] = {}
    for pair in given if isinstance(given, list) else ():
        value = pair.get("value") if isinstance(pair, Mapping) else None
        if isinstance(value, Mapping) and value:
            kind, plain = next(iter(value.items()))
            found[str(pair.get("key"))] = int(plain) if kind == "intValue" else plain
    return found


def _response(responses: Mapping[str, str] | None, *places: Any) -> str:
    ids = [str(place) for place in places if place]
    if not ids:
        raise _Skip("on no trace or run")
    if responses is None:
        return ids[0]
    found = next((responses[id_] for id_ in ids if id_ in responses), None)
    if found is None:
        raise _Skip("its trace has no response id")
    return found


def _needed(value: Any, name: str) -> Any:
    if value in (None, ""):
        raise _Skip(f"without {name}")
    return value


def _seconds(given: Any) -> float:
    """Of an ISO 8601 time, UTC where it names no zone, or of seconds."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    try:
        time = datetime.fromisoformat(str(given))
    except ValueError:
        raise _Skip("without a time") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _id(tool: str, *parts: Any) -> str:
    return f"{tool}-{hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:40]}"


__all__ = ["Imported", "from_langfuse", "from_langsmith", "from_otel"]
