"""Feedback of other tools as events; what has no counterpart is named and counted."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.product.adapters import from_langfuse, from_langsmith, from_otel
from ostinato.apps.product.events import Kind

OTEL = {
    "eventName": "gen_ai.evaluation.result",
    "timeUnixNano": "1764000000500000000",
    "traceId": "5b8e",
    "attributes": {
        "gen_ai.evaluation.name": "helpful",
        "gen_ai.evaluation.score.value": 0.75,
        "gen_ai.evaluation.explanation": "nearly",
        "gen_ai.response.id": "chatcmpl-1",
    },
}
LANGFUSE = {
    "id": "s1",
    "traceId": "t1",
    "observationId": "o1",
    "name": "thumb",
    "value": 1,
    "dataType": "BOOLEAN",
    "timestamp": "2025-11-24T16:00:00.500Z",
    "comment": "nice",
}
LANGSMITH: dict[str, Any] = {
    "id": "f1",
    "run_id": "run1",
    "trace_id": "t1",
    "key": "user_score",
    "score": 0,
    "created_at": "2025-11-24T16:00:00.5",
    "feedback_source": {"type": "app", "user_id": "u1"},
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_an_evaluation_of_opentelemetry() -> None:
    pairs = [
        {"key": key, "value": {"doubleValue" if key.endswith("value") else "stringValue": value}}
        for key, value in OTEL["attributes"].items()
    ]
    found = from_otel([OTEL, OTEL | {"attributes": pairs}])
    first, second = found.events
    assert first == second  # the two forms of attributes
    assert (first.kind, first.value, first.ts) == (Kind.RATING, 0.5, 1764000000.5)
    assert (first.response_id, first.text) == ("chatcmpl-1", "nearly")
    label = {**OTEL["attributes"], "gen_ai.evaluation.score.label": "fail"}
    del label["gen_ai.evaluation.score.value"]
    assert from_otel([OTEL | {"attributes": label}]).events[0].value == -1.0


def test_what_an_evaluation_may_lack_is_named() -> None:
    attributes = OTEL["attributes"]
    rows = [
        {"eventName": "gen_ai.client.inference.operation.details"},
        OTEL | {"attributes": attributes | {"error.type": "timeout"}},
        OTEL | {"attributes": attributes | {"gen_ai.response.id": None}},
        OTEL | {"attributes": attributes | {"gen_ai.evaluation.score.value": 7}},
        OTEL | {"timeUnixNano": None},
    ]
    found = from_otel(rows)
    assert found.events == ()
    assert found.skipped == {
        "event gen_ai.client.inference.operation.details": 1,
        "the evaluation failed": 1,
        "without gen_ai.response.id": 1,
        "a score outside 0 to 1": 1,
        "without a time": 1,
    }


def test_scores_of_langfuse() -> None:
    word = LANGFUSE | {"id": "s2", "value": None, "stringValue": "Incorrect", "dataType": "CATEGORICAL"}
    better = LANGFUSE | {"id": "s3", "dataType": "CORRECTION", "stringValue": "the better text"}
    found = from_langfuse([LANGFUSE, word, better], {"t1": "chatcmpl-1"})
    assert [(e.kind, e.value, e.after) for e in found.events] == [
        (Kind.RATING, 1.0, None),
        (Kind.RATING, -1.0, None),
        (Kind.EDIT, None, "the better text"),
    ]
    assert {e.response_id for e in found.events} == {"chatcmpl-1"} and found.events[0].ts == 1764000000.5
    other = {"id": "s4", "sessionId": "s", "value": 1, "timestamp": "2025-11-24T16:00:00Z"}
    assert from_langfuse([other]).skipped == {"a score of a session or a dataset run": 1}
    assert from_langfuse([LANGFUSE], {}).skipped == {"its trace has no response id": 1}


def test_feedback_of_langsmith() -> None:
    rows = [
        LANGSMITH,
        LANGSMITH | {"id": "f2", "correction": {"output": "68"}},
        LANGSMITH | {"id": "f3", "score": None, "comment": "hm"},
        LANGSMITH | {"id": "f4", "score": None, "value": "good"},
        LANGSMITH | {"id": "f5", "score": None, "value": {"stars": 3}},
    ]
    found = from_langsmith(rows)
    assert [(e.kind, e.value, e.after, e.text) for e in found.events] == [
        (Kind.RATING, -1.0, None, ""),
        (Kind.EDIT, None, "68", ""),
        (Kind.COMMENT, None, None, "hm"),
        (Kind.RATING, 1.0, None, ""),
    ]
    assert found.skipped == {"neither a score nor a known word": 1}
    assert found.events[0].user == "u1" and found.events[0].ts == 1764000000.5  # UTC without a zone


@given(
    st.lists(_JSON | st.fixed_dictionaries({"id": _JSON, "traceId": _JSON, "run_id": _JSON, "score": _JSON}))
)
def test_every_row_is_an_event_or_counted(rows: list[Any]) -> None:
    for read in (from_otel, from_langfuse, from_langsmith):
        found = read(rows)
        assert len(found.events) + sum(found.skipped.values()) == len(rows)
        assert read(rows) == found


def test_the_same_export_twice_gives_the_same_ids() -> None:
    assert from_langfuse([LANGFUSE]).events == from_langfuse([LANGFUSE]).events
    assert from_langfuse([LANGFUSE]).events[0].event_id != from_langsmith([LANGSMITH]).events[0].event_id
