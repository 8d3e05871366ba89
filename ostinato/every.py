"""Intervals at which something is done, in steps or compute."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum


class Axis(StrEnum):
    """Units of compute. ``Axis("gpu-hours")`` is DEVICE_HOURS, by the name in papers."""

    DEVICE_HOURS = "device-hours"  # devices times wall clock, idle ones too
    HOURS = "hours"  # of wall clock
    FLOPS = "flops"
    TOKENS = "tokens"  # sampled
    STEPS = "steps"
    MONEY = "money"  # the price of these device-hours

    @classmethod
    def _missing_(cls, value: object) -> Axis | None:
        return cls.DEVICE_HOURS if value == "gpu-hours" else None

    @classmethod
    def parse(cls, text: str, field: str) -> Axis:
        """The axis named ``text``. Raises ValueError, which names ``field``."""
        try:
            return cls(text)
        except ValueError:
            raise ValueError(f"{field} is {text!r}; use one of {', '.join(cls)}") from None

    @property
    def unit(self) -> str:
        """The unit's text behind a number."""
        return "FLOP" if self is Axis.FLOPS else str(self)


MONEY = "total/money/"  # and a currency
UNITS = (Axis.STEPS, Axis.FLOPS, Axis.TOKENS, Axis.HOURS, Axis.DEVICE_HOURS)  # of steps alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """An interval: whenever ``amount`` more of ``unit`` has been spent; an amount of 0 means never."""

    amount: float = 0.0
    unit: Axis = Axis.STEPS

    @classmethod
    def parse(cls, value: int | str, field: str) -> Every:
        """The interval of a number of steps, or a text such as "2e14 flops". Raises ValueError, which names
        ``field``."""
        if isinstance(value, int):
            return cls(amount=float(value))
        number, _, name = value.strip().partition(" ")
        with suppress(ValueError):  # "1.2.3", parsecs
            unit = Axis(name.strip())
            # float() alone would take "nan", "infinity" and "1_000" too
            if re.fullmatch(r"[\d.]+(?:[eE][+-]?\d+)?", number) and unit in UNITS:
                amount = float(number)
                if 0 < amount < math.inf:
                    return cls(amount=amount, unit=unit)
        raise ValueError(
            f"{field} is {value!r}; use a number of steps, or a positive amount of {', '.join(UNITS)}, e.g. "
            '"2e14 flops"'
        )

    def times(self, spent: Mapping[str, float]) -> int:
        """Number of times the amount has been spent (``spent_in_steps``)."""
        return math.floor(self._read_spent(spent) / self.amount) if self.amount else 0

    def share(self, spent: Mapping[str, float]) -> float:
        """Share of the amount that has been spent; 0 for never."""
        return self._read_spent(spent) / self.amount if self.amount else 0.0

    def part(self, share: float) -> Every:
        return replace(self, amount=share * self.amount)

    def _read_spent(self, spent: Mapping[str, float]) -> float:
        match self.unit:
            case Axis.HOURS:
                return spent.get("seconds", 0.0) / 3600
            case Axis.DEVICE_HOURS:
                return spent.get("device_hours", 0.0)
            case unit:
                return spent.get(unit, 0.0)


NEVER = Every()


def spent_in_steps(step: int, totals: Mapping[str, float]) -> dict[str, float]:
    """Training compute up to the end of ``step``, from the sums of ``pipeline.account.add_totals``.

    Only the steps that made the policy count. Loading, time between steps, lost and repeated work are in the
    ledger alone (``observe.ledger.spent``), as are FLOPs that the recipe did not require (``Costs.compute``),
    so that flops, tokens and steps are the same in every run of a recipe. ``money/CURRENCY`` is missing if a
    step had no price.
    """
    money = {name.removeprefix("total/"): n for name, n in totals.items() if name.startswith(MONEY)}
    return {
        "flops": totals.get("total/compute_flops", 0.0),
        "tokens": totals.get("total/sampled_tokens", 0.0),
        "device_hours": totals.get("total/device_seconds", 0.0) / 3600,
        "seconds": totals.get("total/seconds", 0.0),
        "steps": float(step),
        **money,
    }
