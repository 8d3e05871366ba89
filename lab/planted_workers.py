"""A worker with a planted defect, for ``ostinato bench faults``: a trainer that computes a NaN. Otherwise the
same objects as ``launch.workers`` makes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lab.faults_planted import planned, struck
from ostinato.launch import RunFailed, workers
from ostinato.launch.session import learn
from ostinato.launch.workers import sampler as sampler
from ostinato.train.remote import Snapshot, Stepped, TrainerServer
from ostinato.types import Batch


def trainer(recipe: str, refused: str) -> TrainerServer | Spoilt:
    """With "nan": one number of the adapter is none after ``step`` batches."""
    made, plan = workers.trainer(recipe, refused), planned("nan")
    return Spoilt(made, plan["step"]) if plan else made


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
