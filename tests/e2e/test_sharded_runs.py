"""Trainers over several ranks, alone and in runs: one that is lost ends all, by name and in time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from commands import command
from ranks import on_ranks
from short_run import SHORT, STEPS
from small_loop import BanditTrainer, Bench
from toy_trainer import NONE, Toy, Trouble, batch_of

from ostinato.algo.routing import Cause, Diagnosis, Misaligned
from ostinato.parallel.launch import local_place
from ostinato.parallel.ranks import Terms, follow_calls, lead, meet
from ostinato.pipeline.state import LoopState
from ostinato.types import Batch, StepReport
from ostinato.workers.remote import WorkerLost

pytestmark = pytest.mark.slow

TIMEOUT_S = 6.0
ANSWERS = (Misaligned,)
TERMS = Terms(backend="gloo", timeout_s=TIMEOUT_S, recipe="the recipe")


def run(rank: int, world: int, port: int, steps: int, trouble: Trouble) -> dict[str, Any]:
    """What came of it on each rank."""
    place, started = local_place(world, port, rank), time.monotonic()
    try:
        if rank:
            follow_calls(place, lambda recipe, ready: Toy(rank, trouble), ANSWERS)
            return {"ended": True}
        with lead(place, meet(place), TERMS, lambda ready: Toy(rank, trouble), answers=ANSWERS) as trainer:
            batch = batch_of(np.arange(4.0))
            reports = [trainer.step(batch).metrics for _ in range(steps)]
            tensors = trainer.tensors()
            trainer.restore({"value": tensors["value"] * 2}, {"steps": 40})
            return {"reports": reports, "value": trainer.adapters(), "counters": trainer.counters()}
    except (WorkerLost, Misaligned, ValueError) as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_three(trouble: Trouble, lost: tuple[int, ...] = ()) -> list[Any]:
    return on_ranks(3, run, free_port(), 3, trouble, timeout_s=120, lost=lost, group=False)


def test_all_ranks_do_the_same() -> None:
    found, *others = on_three(NONE)
    total = np.arange(4.0).sum() * 6 * 3  # summed over ranks, twice
    assert found["reports"] == [{"sum": total, "rank": 0.0}] * 3
    assert torch.equal(found["value"], torch.arange(4, dtype=torch.float64) * 6 * 3 * 3 * 2)
    assert found["counters"] == {"steps": 40}
    assert others == [{"ended": True}] * 2  # by themselves


@pytest.mark.parametrize(("what", "rank"), [("kill", 1), ("stop", 2), ("raise", 2), ("refuse", 1)])
def test_a_lost_rank_ends_all_by_name_and_within_the_bound(what: str, rank: int) -> None:
    """Killed, silent, broken by an error of its own, or waiting for a call that the others are still in."""
    found, *others = on_three(Trouble(what=what, rank=rank, step=2), lost=(rank,))
    assert found["error"] == "WorkerLost" and "rank 0 saw in step 2" in found["text"], found
    assert found["seconds"] < 3 * TIMEOUT_S
    for other, ended in enumerate(others, start=1):
        assert other == rank or ended["error"] == "WorkerLost"


@pytest.mark.parametrize("who", [-1, 0])
def test_what_rank_0_raises_comes_as_itself(who: int) -> None:
    found, *others = on_three(Trouble(what="raise", rank=who, step=2))
    assert (found["error"], found["text"]) == ("ValueError", "step 2 does not suit rank 0")
    assert all(one["error"] in ("ValueError", "WorkerLost") for one in others)


def came_late(rank: int, world: int, port: int) -> str:
    if rank:
        return ""
    place = local_place(world, port)
    try:
        with lead(place, meet(place), replace(TERMS, timeout_s=2.0), lambda ready: Toy(0)):
            return "they came"
    except WorkerLost as lost:
        return str(lost)


def test_a_rank_that_does_not_come_is_named() -> None:
    found, *_ = on_ranks(3, came_late, free_port(), timeout_s=60, group=False)
    assert "ranks 1, 2 of 3 did not come to 127.0.0.1:" in found and found.endswith("within 2 s")


# ---- refusals: an answer of all ranks


def refused(rank: int, world: int, port: int) -> dict[str, Any]:
    """Of three steps the second is refused, by all."""
    place, trouble = local_place(world, port, rank), Trouble(what="refuse", rank=-1, step=2)
    if rank:
        follow_calls(place, lambda recipe, ready: Toy(rank, trouble), ANSWERS)
        return {"ended": True}
    with lead(place, meet(place), TERMS, lambda ready: Toy(rank, trouble), answers=ANSWERS) as trainer:
        batch = batch_of(np.arange(4.0))
        first = trainer.step(batch).metrics
        with pytest.raises(Misaligned, match="step 2 has routes of others"):
            trainer.step(batch)
        saved = {"first": first, "failed": trainer.failed, "tensors": dict(trainer.tensors())}
        return saved | {"second": trainer.step(batch).metrics, "counters": trainer.counters()}


def test_what_all_ranks_refuse_leaves_them_as_they_were() -> None:
    found, *others = on_ranks(3, refused, free_port(), timeout_s=120, group=False)
    assert found["failed"] == ""
    assert torch.equal(found["tensors"]["value"], torch.arange(4, dtype=torch.float64) * 6 * 3)
    assert found["second"] == found["first"] and found["counters"] == {"steps": 2}
    assert others == [{"ended": True}] * 2


class Bandit(BanditTrainer):
    """``ranks.Local``: the trainer of ``small_loop``, which refuses the batch of one step."""

    progress = 0.0

    def __init__(self, refuses: int) -> None:
        super().__init__()
        self.steps, self.refuses = 0, refuses

    def step(self, batch: Batch) -> StepReport:
        dist.all_reduce(torch.zeros(1))
        if self.steps + 1 == self.refuses:
            raise Misaligned("routes of others", Diagnosis(cause=Cause.SHIFTED, fixed_overlap=1.0))
        self.steps += 1
        return super().step(batch)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        dist.all_reduce(torch.zeros(1))
        return {"logits": torch.from_numpy(self.logits.copy())}

    def restore(self, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> None:
        self.logits, self.steps = tensors["logits"].numpy().copy(), counters["steps"]

    def identity(self) -> dict[str, str]:
        return {}

    def counters(self) -> Mapping[str, int]:
        return {"steps": self.steps}


def looped(rank: int, world: int, port: int, folder: str, refuses: int, saved: Any) -> dict[str, Any]:
    """A run over the ranks, from what was ``saved``; and what it has saved last."""
    place = local_place(world, port, rank)
    if rank:
        follow_calls(place, lambda recipe, ready: Bandit(refuses), ANSWERS)
        return {}
    with lead(place, meet(place), TERMS, lambda ready: Bandit(refuses), answers=ANSWERS) as trainer:
        state = LoopState(**saved["state"]) if saved else None
        bench = Bench(Path(folder) / "run", steps=5, checkpoint_every=2, state=state)
        if saved:
            trainer.restore(saved["tensors"], {"steps": state.step if state else 0})
        kept: dict[str, Any] = {"error": ""}

        def save(state: LoopState) -> int:
            kept.update(state=json.loads(json.dumps(state.to_json())), tensors=dict(trainer.tensors()))
            return state.step

        bench.loop.trainer, bench.loop.save = trainer, save
        try:
            bench.run()
        except (Misaligned, WorkerLost) as error:
            kept["error"] = type(error).__name__
        return kept | {"spooled": [row["rollout/from_spool"] for row in bench.rows]}


def test_a_run_over_ranks_goes_on_after_a_refusal(tmp_path: Path) -> None:
    """The error was WorkerLost, from the checkpoint that came first: step 3 was lost, and the groups of step
    4 stayed in the spool, to be refused for ever."""
    whole = Bench(tmp_path / "whole", steps=5, checkpoint_every=2)
    whole.run()
    first, *_ = on_ranks(2, looped, free_port(), str(tmp_path), 4, None, timeout_s=300, group=False)
    assert first["error"] == "Misaligned"
    assert first["state"]["step"] == 3
    second, *_ = on_ranks(2, looped, free_port(), str(tmp_path), 0, first, timeout_s=300, group=False)
    assert second["error"] == "" and second["state"]["step"] == 5
    assert second["spooled"] == [0, 0]
    assert second["tensors"]["logits"].numpy().tobytes() == whole.trainer.logits.tobytes()


# ---- the beginning


def loaded(rank: int, world: int, port: int) -> Any:
    """Rank 1 has its part on a cold disk."""
    place, bound = local_place(world, port, rank), timedelta(seconds=2)

    def new(ready: Callable[[], None]) -> Toy:
        time.sleep(4.0 * rank)
        ready()
        dist.new_group(backend="gloo", timeout=bound)
        return Toy(rank)

    if rank:
        follow_calls(place, lambda recipe, ready: new(ready))
        return "ended"
    with lead(place, meet(place), replace(TERMS, timeout_s=bound.total_seconds()), new) as trainer:
        return trainer.step(batch_of(np.arange(4.0))).metrics["sum"]


def test_a_cold_load_may_take_longer_than_a_collective() -> None:
    found = on_ranks(2, loaded, free_port(), timeout_s=60, group=False)
    assert found == [np.arange(4.0).sum() * 3 * 2, "ended"]


# ---- ``ostinato train`` over several ranks of this host


RUN = SHORT | {"parallel.layout": "d2"}


def train(folder: Path) -> list[str]:
    return ["train", "quickstart", f"log.dir={folder}", *(f"{key}={value}" for key, value in RUN.items())]


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command(*arguments), stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(true: Callable[[], object], folder: Path, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.02)


def rows(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl"))


def followers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if child.cmdline()[-1:] == ["rank"]]


def adapter(folder: Path) -> bytes:
    (path,) = folder.glob("*/adapter/adapter_model.safetensors")
    return path.read_bytes()


def run_of(folder: Path) -> str:
    (recipe,) = folder.glob("*/recipe.toml")
    return str(recipe.parent)


@pytest.mark.timeout(600)
def test_a_run_survives_the_loss_of_any_rank(tmp_path: Path) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    with started(whole, *train(whole)) as process:
        assert process.wait(240) == 0, (whole / "log").read_text()

    with started(hurt, *train(hurt)) as process:
        until(lambda: rows(hurt) >= 1, hurt)
        (follower,) = followers(process)
        follower.kill()
        assert process.wait(60) == 75, (hurt / "log").read_text()
    output = (hurt / "log").read_text().splitlines()[-1]
    assert output.startswith("ostinato: rank 1 ended: killed by signal 9"), output
    assert output.endswith(f"to go on: ostinato resume {run_of(hurt)}")
    assert rows(hurt) < STEPS

    with started(hurt, "resume", run_of(hurt)) as process:
        until(lambda: rows(hurt) >= 3, hurt)
        (follower,) = followers(process)
        process.kill()
        process.wait()
    gone, alive = psutil.wait_procs([follower], timeout=20)
    assert not alive and gone, "rank 1 has outlived rank 0"
    assert rows(hurt) < STEPS

    with started(hurt, "resume", run_of(hurt)) as process:
        assert process.wait(240) == 0, (hurt / "log").read_text()
    assert adapter(whole) == adapter(hurt)
    assert rows(hurt) == rows(whole) == STEPS


@pytest.mark.timeout(300)
def test_ctrl_c_is_rank_0s_affair(tmp_path: Path) -> None:
    """SIGINT goes to every process of a terminal: the step is finished by all ranks, saved, and all end."""
    with started(tmp_path, *train(tmp_path)) as process:
        until(lambda: rows(tmp_path) >= 1, tmp_path)
        (follower,) = followers(process)
        follower.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, (tmp_path / "log").read_text()
        assert not follower.is_running()
    assert "interrupted after step" in (tmp_path / "log").read_text()
    (checkpoint, *_) = sorted(tmp_path.glob("*/checkpoints/step-*"))[::-1]
    assert int(checkpoint.name.removeprefix("step-")) == rows(tmp_path)


def test_layouts_that_cannot_be_are_refused_before_any_rank_begins(tmp_path: Path) -> None:
    for layout, sentence in (("d2q3", "d2q3"), ("t7", "t7")):
        with started(tmp_path, *train(tmp_path), f"parallel.layout={layout}") as process:
            assert process.wait(120) == 2
        last = (tmp_path / "log").read_text().splitlines()[-1]
        assert last.startswith("ostinato: ") and sentence in last, last
        assert not list(tmp_path.glob("*/ranks"))
