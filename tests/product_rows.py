"""Exchanges and events of a product, made up for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from ostinato.apps.product.events import Action, Event, Exchange, Kind


def exchange(response_id: str = "r", ts: float = 1000.0, prompt: str = "hi", **changes: Any) -> Exchange:
    none = np.zeros(0, np.int32)
    usual = {
        "model": "m",
        "revision": "v0",
        "messages": ({"role": "user", "content": prompt},),
        "output": "one two three four",
        "action": Action.ANSWER,
        "prompt_tokens": none,
        "tokens": none,
        "logprobs": np.zeros(0, np.float32),
        "user": "u",
    }
    return Exchange(**{"response_id": response_id, "ts": ts, **usual, **changes})


def event(kind: Kind, response_id: str = "r", ts: float = 1001.0, **changes: Any) -> Event:
    user = changes.setdefault("user", "u")
    name = f"{response_id}-{kind}-{ts:g}-{user}"
    if kind is Kind.EDIT:
        changes.setdefault("after", "one two three five")
    if kind in (Kind.RATING, Kind.DWELL):
        changes.setdefault("value", 1.0)
    return Event(**{"event_id": name, "response_id": response_id, "kind": kind, "ts": ts, **changes})
