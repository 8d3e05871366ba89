"""What compute is counted in: one name for each axis, wherever one is requested or reported."""

from __future__ import annotations

from enum import StrEnum


class Axis(StrEnum):
    """``Axis("gpu-hours")`` is DEVICE_HOURS, by the name that papers have for them."""

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
        """Raises ValueError, which names ``field``."""
        try:
            return cls(text)
        except ValueError:
            raise ValueError(f"{field} is {text!r}; use one of {', '.join(cls)}") from None

    @property
    def unit(self) -> str:
        """As it stands behind a number."""
        return "FLOP" if self is Axis.FLOPS else str(self)
