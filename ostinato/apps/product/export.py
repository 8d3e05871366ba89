"""Events and exchanges as parquet files for others: without what is personal, and what has no consent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ostinato.apps.product.events import Event, Exchange
from ostinato.apps.product.store import Store

ROWS = 1_000  # of a row group


def export(store: Store, folder: Path) -> tuple[int, int]:
    """Write ``events.parquet`` and ``exchanges.parquet``; (events, exchanges) that are in them.

    An answer on which any event is personal or without consent is left out, with all its events. Both files
    are of one watermark. Raises ValueError without pyarrow.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ValueError('an export to parquet needs pyarrow; pip install "ostinato[data]"') from None
    texts = (
        "event_id",
        "response_id",
        "kind",
        "user",
        "session",
        "tenant",
        "text",
        "after",
        "replaces",
        "arm",
    )
    events = {**dict.fromkeys(texts, pa.string()), "alternatives": pa.list_(pa.string()), "rank": pa.int32()}
    events |= dict.fromkeys(("ts", "value", "propensity"), pa.float64())
    names = (
        "response_id",
        "model",
        "revision",
        "messages",
        "output",
        "action",
        "sampling",
        "user",
        "session",
    )
    answers = {**dict.fromkeys((*names, "tenant", "arm"), pa.string()), "logprobs": pa.list_(pa.float32())}
    answers |= dict.fromkeys(("prompt_tokens", "tokens"), pa.list_(pa.int32()))
    answers |= dict.fromkeys(("ts", "propensity"), pa.float64())
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, fields: dict[str, Any], rows: Iterator[dict[str, Any]]) -> int:
        schema, count, partial = pa.schema([*fields.items()]), 0, folder / f"{name}.part"
        with parquet.ParquetWriter(partial, schema) as writer:
            while some := list(islice(rows, ROWS)):
                writer.write_table(pa.Table.from_pylist(some, schema))
                count += len(some)
        os.replace(partial, folder / name)
        return count

    mark, held = store.watermark(), store.held()
    feedback = (_event(event) for event in store.events(upto=mark) if event.response_id not in held)
    kept = (_exchange(each.exchange) for each in store.joined(upto=mark))
    return (
        write("events.parquet", events, feedback),
        write("exchanges.parquet", answers, (row for row in kept if row["response_id"] not in held)),
    )


def _event(event: Event) -> dict[str, Any]:
    row = event.model_dump(mode="json", exclude={"exposure", "consent", "personal"})
    return row | event.exposure.model_dump(mode="json")


def _exchange(exchange: Exchange) -> dict[str, Any]:
    row = {name: getattr(exchange, name) for name in Exchange.__slots__ if name != "experts"}
    return row | {name: json.dumps(row[name]) for name in ("messages", "sampling")}


__all__ = ["export"]
