"""Rows of mismatch.jsonl as they are read: arms, routers, curves. What is damaged counts as missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.observe.report.reading import Row, RunData, numbers

DIRECTION = "KL(sampler || trainer)"
ARMS = {  # name, color, which experts the trainer used
    "native": ("native", "--red", "own experts"),
    "replay": ("with replay", "--blue", "the sampler's experts"),
    "floor": ("floor", "--grey", "trainer against itself"),
}
GATE = 0.9  # trainer.replay_threshold of a recipe that names none


def measured(data: RunData) -> list[Row]:
    """The rows of mismatch.jsonl that hold a native arm, in order of steps."""
    return [row for row in data.mismatch if arm(row, "native")]


def arm(row: Row, name: str) -> Row:
    """One arm of a measurement; empty where it has none."""
    arms = row.get("arms")
    found = arms.get(name) if isinstance(arms, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def last_arm(rows: Sequence[Row], name: str) -> Row:
    """That of the last measurement which has it: the floor is measured once."""
    return next((found for row in reversed(rows) if (found := arm(row, name))), {})


def routers(row: Row) -> Row:
    found = row.get("routers")
    return found if isinstance(found, Mapping) else {}


def points(one: Row, name: str) -> list[tuple[float, float]]:
    """The pairs (at, share) of a curve of an arm, "tails" or "cdf"."""
    found = [numbers(dict(zip("xy", pair, strict=False))) for pair in _items(one, name, list)]
    return [(pair["x"], pair["y"]) for pair in found if len(pair) == 2 and pair["x"] > 0]


def layers(choice: Row) -> list[Row]:
    """The figures of each layer, of ``routers``."""
    return _items(choice, "layers", Mapping)


def stretches(choice: Row) -> list[tuple[int, int, float]]:
    """(first position, last, share of routers that differ), of ``routers``."""
    found = [numbers(dict(zip("xyz", part, strict=False))) for part in _items(choice, "positions", list)]
    return [(int(part["x"]), int(part["y"]), part["z"]) for part in found if len(part) == 3]


def _items(row: Row, name: str, kind: type) -> list[Any]:
    """What is of ``kind`` in the list under ``name``; nothing where there is no list."""
    items = row.get(name)
    return [item for item in items if isinstance(item, kind)] if isinstance(items, list) else []


def tail(one: Row, tau: float) -> float | None:
    """F(tau) of an arm: the share of tokens whose ratio lies beyond tau or 1/tau."""
    return next((share for at, share in points(one, "tails") if math.isclose(at, tau)), None)


def gate(data: RunData) -> float:
    """The overlap below which a sequence's routes are refused; 0 without a gate, as where replay is off."""
    if data.setting("trainer.replay", True) is False:
        return 0.0
    return float(data.setting("trainer.replay_threshold", GATE))
