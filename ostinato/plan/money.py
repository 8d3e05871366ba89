"""What a plan costs. The price of a device's hour is an assumption, and is told with every figure."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.plan.problem import Arrangement, Problem, Times

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """In the currency of ``price``."""

    price: float  # of one device and hour, assumed
    devices: int
    step: float
    run: float
    million: float  # of trained tokens

    def assumption(self, currency: str = "$") -> str:
        """The sentence that belongs to the figures."""
        price = f"{currency}{self.price:g} per device and hour"
        return f"{price}, {self.devices} devices, all of them held all the time"


def cost(problem: Problem, arrangement: Arrangement, times: Times) -> Money:
    """Of ``times``, one RL step of ``arrangement``, and of the ``work.steps`` of a run."""
    devices, price = arrangement.num_gpus, problem.cluster.gpu.price
    step = devices * price * times.total / HOUR
    return Money(
        price=price,
        devices=devices,
        step=step,
        run=step * problem.work.steps,
        million=1e6 * step / problem.work.trained_tokens,
    )


__all__ = ["Money", "cost"]
