"""Workers with a planted defect, for ``ostinato bench faults``: a prompt that ends the worker that gets it, a
trainer that computes a NaN. Otherwise the same objects as ``launch.workers`` makes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lab.faults_planted import planned, struck
from ostinato.engine.serve import SamplerServer
from ostinato.launch import RunFailed, workers
from ostinato.launch.session import learn
from ostinato.train.remote import Snapshot, Stepped, TrainerServer
from ostinato.types import Batch, PollResult, Publication, Request


def sampler(recipe: str, name: str, history: str = "") -> SamplerServer | Poisoned:
    """With "poison": the process that is given the prompt at ``place`` is gone soon after."""
    made, plan = workers.sampler(recipe, name, history), planned("poison")
    return Poisoned(made, plan["place"], plan["within_s"]) if plan else made


def trainer(recipe: str, refused: str) -> TrainerServer | Spoilt:
    """With "nan": one number of the adapter is none after ``step`` batches."""
    made, plan = workers.trainer(recipe, refused), planned("nan")
    return Spoilt(made, plan["step"]) if plan else made


class Poisoned:
    """``protocols.Sampler``, and its end."""

    def __init__(self, sampler: SamplerServer, place: int, within_s: float) -> None:
        self._sampler, self._place, self._within_s = sampler, place, within_s

    async def start(self, calls: Sequence[tuple[int, Request]], drop: Sequence[int] = ()) -> None:
        others = [call for call in calls if not self._is_poison(call[1].seed)]
        if len(others) < len(calls):
            struck()
            after = random.uniform(0, self._within_s)
            asyncio.get_running_loop().call_later(after, os.kill, os.getpid(), signal.SIGKILL)
        await self._sampler.start(others, drop)

    def _is_poison(self, seed: Sequence[int]) -> bool:
        """Of (run, step, place, sample); an evaluation has step 0."""
        return seed[1] > 0 and seed[2] == self._place

    async def collect(self, wait_s: float) -> PollResult:
        return await self._sampler.collect(wait_s)

    async def publish(self, publication: Publication) -> str:
        return await self._sampler.publish(publication)


class Spoilt:
    """What ``train.remote.TrainerLink`` calls, of a trainer that computes a NaN once."""

    def __init__(self, trainer: TrainerServer, step: int) -> None:
        self._trainer, self._left = trainer, step

    def step(self, batch: Batch) -> Stepped:
        stepped = self._trainer.step(batch)
        self._left -= 1
        if self._left:
            return stepped
        adapters = self._trainer.adapters()
        next(adapters.parameters()).data.view(-1)[0] = float("nan")
        struck()
        return replace(stepped, adapters=adapters, snapshot=self.snapshot())

    def snapshot(self) -> Snapshot:
        return self._trainer.snapshot()

    def adapters(self) -> Any:
        return self._trainer.adapters()

    def restore(self, snapshot: Snapshot) -> None:
        self._trainer.restore(snapshot)

    def identity(self) -> dict[str, str]:
        return self._trainer.identity()


def main(arguments: Sequence[str]) -> int:
    """``ostinato train`` with the workers above. Returns the exit code."""
    try:
        learn(*arguments, workers="lab.planted_workers")
    except (ValueError, RunFailed, OSError) as error:
        print("ostinato:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
