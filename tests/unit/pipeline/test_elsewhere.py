"""The loop with a trainer in a worker that is lost, on the bandit of ``small_loop``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_loop import BanditTrainer, Bench, Lesson

from ostinato.observe.ledger import Ledger, Terms
from ostinato.observe.timeline import Kind
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.train.remote import TrainerLink, TrainerServer
from ostinato.types import Batch, StepReport
from ostinato.workers.lost import WorkerKind, WorkerLost


class Restorable(BanditTrainer):
    """What a trainer has to have to be made anew."""

    steps, progress = 0, 0.0

    def step(self, batch: Batch) -> StepReport:
        self.steps += 1
        return super().step(batch)

    def tensors(self) -> dict[str, Any]:
        return {"logits": self.adapters()}

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps}

    def restore(self, tensors: Any, counters: Any) -> None:
        self.logits, self.steps = tensors["logits"], counters["steps"]

    def identity(self) -> dict[str, str]:
        return {}


class Elsewhere:
    """``remote.Remote`` to such a trainer. ``dies(life, step)`` says whether the worker, the ``life``-th of
    its kind, is killed when it has nearly done the step."""

    name = "trainer"

    def __init__(self, life: int, seconds: float, dies: Callable[[int, int], bool]) -> None:
        self._trainer = Restorable()
        self._trainer.seconds = seconds
        self._server, self._dies = TrainerServer(self._trainer), lambda: dies(life, self._trainer.steps)

    def wait(self, method: str, *arguments: Any, within_s: float) -> Any:
        answer = getattr(self._server, method)(*arguments)
        if method == "step" and self._dies():
            raise WorkerLost(WorkerKind.TRAINER, "was lost while it did step: its process ended", "trainer")
        return answer

    async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any: ...

    def kill(self) -> None: ...


def elsewhere(
    path: Path, dies: Callable[[int, int], bool], seconds: float = 0.0, **changes: Any
) -> tuple[Bench, TrainerLink]:
    """As a cluster has it: the loop waits in a thread, in lockstep too."""
    lives = itertools.count()
    link = TrainerLink(lambda: Elsewhere(next(lives), seconds, dies), within_s=9.0, max_restarts=2)
    bench = Bench(path, grader=Lesson(), **changes)
    bench.loop.trainer, bench.loop.worker = link, "controller"
    bench.workers.progress = lambda: link.progress
    bench.workers.trainer_consistent = lambda: link.consistent
    terms = Terms(devices=2, pools={"samplers": 1, "trainer": 1})
    bench.loop.span_sources, bench.loop.ledger = [link], Ledger(folder=bench.folder, terms=terms)

    def save(state: LoopState) -> int:
        bench.saved.append((state.to_json(), link.tensors()["logits"]))
        return state.step

    bench.loop.save = save
    return bench, link


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trainer_killed_late_in_a_long_step_is_made_anew(tmp_path: Path, overlap: bool) -> None:
    """The watch had the bound of the trainer's own wait: a step done twice, each time within it, was taken
    for one that nothing ends. What the loop does meanwhile is to wait, and is told so."""
    changes = {"steps": 3, "watch_s": 0.2, "overlap": overlap}
    bench, link = elsewhere(tmp_path, lambda life, step: (life, step) == (0, 2), seconds=0.15, **changes)
    assert bench.run().why is Finish.DONE
    assert link.losses["workers/restarts"] == 1 and len(bench.rows) == 3
    kinds = {row["kind"] for row in bench.folder.timeline.rows() if row["worker"] == "controller"}
    assert Kind.WAIT in kinds and Kind.TRAIN not in kinds


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_whose_trainers_are_lost_saves_its_last_step(tmp_path: Path, overlap: bool) -> None:
    """Up to ``checkpoint_every`` steps were lost with them, though the link had the state after the last."""
    bench, _ = elsewhere(tmp_path, lambda life, step: step == 4, steps=9, checkpoint_every=2, overlap=overlap)
    with pytest.raises(WorkerLost, match="3 trainers in a row"):
        bench.run()
    state, logits = bench.saved[-1]
    plain = Bench(tmp_path / "plain", grader=Lesson(), steps=9, checkpoint_every=3, overlap=overlap)
    plain.run()
    assert state["step"] == 3 and (logits == plain.saved[0][1]).all()
