"""The smallest trainer that needs all of its ranks, and trouble for it by appointment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ostinato.algo.routing import Cause, Diagnosis, Misaligned
from ostinato.types import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What befalls ``rank`` (-1: all) in ``step``, between two collectives of it."""

    what: str = ""  # "kill", "stop", "hang", "raise", "refuse"
    rank: int = 0
    step: int = 0


NONE = Trouble()


def batch_of(numbers: np.ndarray) -> Any:
    """What the toy is trained on, in place of a ``Batch``."""
    return {"numbers": numbers}


@dataclass(slots=True, eq=False)
class Toy:
    """``ranks.Local``: adds to a vector what all ranks say. A step's batch is any array."""

    rank: int
    trouble: Trouble = NONE
    slow: float = 0.0  # seconds between the two collectives of a step
    progress: float = 0.0
    steps: int = 0
    value: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    def step(self, batch: Any) -> StepReport:
        reported = torch.from_numpy(np.asarray(batch["numbers"])) * (self.rank + 1)
        dist.all_reduce(reported)
        self.progress += 1
        if self.trouble.step == self.steps + 1 and self.trouble.rank in (self.rank, -1):
            self._meet(self.trouble.what)
        time.sleep(self.slow)
        dist.all_reduce(reported)
        self.progress += 1
        self.value += reported
        self.steps += 1
        return StepReport(metrics={"sum": float(reported.sum()), "rank": float(self.rank)})

    def score(self, batch: Any) -> list[np.ndarray]:
        return []

    def _meet(self, what: str) -> None:
        if what in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
        if what == "hang":
            time.sleep(1000)
        if what == "refuse":
            self.trouble = NONE  # once
            cause = Diagnosis(cause=Cause.SHIFTED, fixed_overlap=1.0)
            raise Misaligned(f"step {self.steps + 1} has routes of others", cause)
        raise ValueError(f"step {self.steps + 1} does not suit rank {self.rank}")

    def adapters(self) -> torch.Tensor:
        reported = self.value.clone()
        dist.broadcast(reported, 0)
        return reported

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"value": self.adapters()}

    def restore(self, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> None:
        self.value, self.steps = tensors["value"].clone(), counters["steps"]

    def identity(self) -> dict[str, str]:
        return {"model": "toy"}

    def counters(self) -> Mapping[str, int]:
        return {"steps": self.steps}
