"""How often something is done: every so many steps, or every so much compute."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """What is counted, of training alone."""

    STEPS = "steps"
    FLOPS = "flops"
    TOKENS = "tokens"  # sampled
    HOURS = "hours"  # of steps
    DEVICE_HOURS = "device-hours"  # of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Whenever ``amount`` more of ``unit`` has been spent; an amount of 0 is never."""

    amount: float = 0.0
    unit: Unit = Unit.STEPS

    @classmethod
    def parse(cls, value: int | str, field: str) -> Every:
        """A number of steps, or text such as "2e14 flops". Raises ValueError, which names ``field``."""
        if isinstance(value, int):
            return cls(amount=float(value))
        number, _, unit = value.strip().partition(" ")
        # float() alone would take "nan", "infinity" and "1_000" too
        if re.fullmatch(r"[\d.]+(?:[eE][+-]?\d+)?", number) and unit.strip() in tuple(Unit):
            try:
                amount = float(number)
            except ValueError:  # "1.2.3"
                amount = 0.0
            if 0 < amount < math.inf:
                return cls(amount=amount, unit=Unit(unit.strip()))
        raise ValueError(
            f"{field} is {value!r}; use a number of steps, or a positive amount of {', '.join(Unit)}, e.g. "
            '"2e14 flops"'
        )

    def times(self, spent: Mapping[str, float]) -> int:
        """How many times the amount has been spent (``pipeline.evaluate.spent``)."""
        return math.floor(self._of(spent) / self.amount) if self.amount else 0

    def _of(self, spent: Mapping[str, float]) -> float:
        match self.unit:
            case Unit.HOURS:
                return spent.get("seconds", 0.0) / 3600
            case Unit.DEVICE_HOURS:
                return spent.get("device_hours", 0.0)
            case unit:
                return spent.get(unit, 0.0)


NEVER = Every()
