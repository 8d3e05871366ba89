"""The smallest trainer that needs all of its ranks, and trouble for it by appointment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ostinato.algo.routing import Cause, Diagnosis, Misaligned
from ostinato.parallel.control import Terms, meet
from ostinato.parallel.follow import following, leading
from ostinato.parallel.launch import Place, choose_interface
from ostinato.types import StepReport
from ostinato.workers.lost import WorkerLost


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
    """``follow.Local``: adds to a vector what all ranks say. A step's batch is any array."""

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
            cause = Diagnosis(cause=Cause.SHIFTED, best=1.0)
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


def leave(sentence: str) -> None:
    """Later than rank 0, whose error it is: torchrun ends all ranks when the first one ends."""
    time.sleep(3)
    os._exit(1)


def train(folder: Path, steps: int, seconds: float) -> None:
    """As a process that torchrun has started: ``steps`` steps of ``seconds`` each, the state after each saved
    in ``folder``, from where it goes on. Rank 0 prints what is lost, the others end."""
    place = Place.of(os.environ)
    assert place is not None
    choose_interface(place, os.environ)
    if place.rank:
        following(place, lambda reported, ready: Toy(place.rank), leave)
        return
    terms = Terms(backend="gloo", timeout_s=20.0, silence_s=5.0, recipe="")
    saved = folder / "state.pt"
    try:
        with leading(place, meet(place), terms, lambda ready: Toy(0, slow=seconds)) as trainer:
            if saved.exists():
                state = torch.load(saved)
                trainer.restore(state["tensors"], state["counters"])
            while (step := trainer.counters()["steps"]) < steps:
                trainer.step(batch_of(np.random.default_rng(step).standard_normal(4)))
                state = {"tensors": dict(trainer.tensors()), "counters": dict(trainer.counters())}
                torch.save(state, folder / "new.pt")
                (folder / "new.pt").replace(saved)
    except WorkerLost as lost:
        print(f"WorkerLost: {lost}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
