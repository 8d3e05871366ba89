"""Trainers over several ranks, alone and in runs: one that is lost ends all, by name and in time."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from ostinato.parallel import control
from ostinato.parallel.control import Terms, meet
from ostinato.parallel.follow import following, leading
from ostinato.parallel.launch import local_place
from ostinato.parallel.watch import GRACE_S
from ostinato.pipeline.state import LoopState
from ostinato.types import Batch, StepReport
from ostinato.workers.lost import WorkerLost

pytestmark = pytest.mark.slow

TIMEOUT_S, SILENCE_S = 8.0, 4.0
KEY = "of these tests alone"
ANSWERS = (Misaligned,)


def run(rank: int, world: int, port: int, folder: str, steps: int, trouble: Trouble) -> dict[str, Any]:
    """Rank 0: what came of it. The others write what they leave with into ``folder``, and end."""
    place = local_place(world, port, rank, KEY)
    if rank:
        if trouble.what == "late":
            return {}
        following(place, lambda reported, ready: Toy(rank, trouble), leaves(folder, rank), ANSWERS)
        return {"ended": True}
    terms = Terms(backend="gloo", timeout_s=TIMEOUT_S, silence_s=SILENCE_S, recipe="the recipe")
    with leading(place, meet(place), terms, lambda ready: Toy(rank, trouble), answers=ANSWERS) as trainer:
        batch = batch_of(np.arange(4.0))
        reports = [trainer.step(batch).metrics for _ in range(steps)]
        tensors = trainer.tensors()
        trainer.restore({"value": tensors["value"] * 2}, {"steps": 40})
        return {"reports": reports, "value": trainer.adapters(), "counters": trainer.counters()}


def leaves(folder: str, rank: int) -> Callable[[str], None]:
    def leave(why: str) -> None:
        (Path(folder) / f"left-{rank}").write_text(why)
        os._exit(1)

    return leave


def caught(rank: int, world: int, port: int, folder: str, steps: int, trouble: Trouble) -> dict[str, Any]:
    """``run``, and what it raised after how long. A trainer that has failed fails again, at once."""
    started = time.monotonic()
    try:
        return run(rank, world, port, folder, steps, trouble)
    except (WorkerLost, Misaligned, ValueError) as error:
        found = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
        gone = [trouble.rank] if trouble.what in ("kill", "stop") else []
        for other in range(1, world):  # all end when this rank has
            if other not in gone and trouble.what != "late":
                output(Path(folder) / f"left-{other}")
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def troubled(tmp_path: Path, trouble: Trouble, world: int = 3, lost: tuple[int, ...] = (1, 2)) -> Any:
    results = on_ranks(
        world, caught, free_port(), str(tmp_path), 3, trouble, timeout_s=300, lost=lost, group=False
    )
    return results[0], {rank: tmp_path / f"left-{rank}" for rank in range(1, world)}


def output(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_text() if path.exists() else "no output"


def test_all_ranks_do_the_same(tmp_path: Path) -> None:
    found, *others = on_ranks(3, run, free_port(), str(tmp_path), 3, NONE, timeout_s=300, group=False)
    total = np.arange(4.0).sum() * 6 * 3  # summed over ranks, twice
    assert found["reports"] == [{"sum": total, "rank": 0.0}] * 3
    assert torch.equal(found["value"], torch.arange(4, dtype=torch.float64) * 6 * 3 * 3 * 2)
    assert found["counters"] == {"steps": 40}
    assert others == [{"ended": True}] * 2  # by themselves, and none is left
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("what", "rank", "step", "why"),
    [
        ("kill", 1, 2, "gave no sign of life for"),
        ("stop", 2, 1, "gave no sign of life for"),
        ("hang", 1, 2, "hangs, for"),
        ("raise", 2, 3, "raised ValueError: step 3 does not suit rank 2, last seen in step 3"),
    ],
)
def test_a_lost_rank_ends_all_by_name(tmp_path: Path, what: str, rank: int, step: int, why: str) -> None:
    found, left = troubled(tmp_path, Trouble(what=what, rank=rank, step=step))
    assert found["error"] == "WorkerLost"
    assert found["text"].startswith(f"rank {rank} on ") and why in found["text"]
    assert f"rank 0 in step {step} at " in found["text"]
    gone = {rank} if what in ("kill", "stop") else set()
    assert all(output(path) == found["text"] for other, path in left.items() if other not in gone)
    assert not any(left[other].exists() for other in gone)


def test_what_rank_0_raises_comes_as_itself(tmp_path: Path) -> None:
    for who in (-1, 0):  # all of them, or rank 0 alone
        folder = tmp_path / str(who)
        folder.mkdir()
        found, left = troubled(folder, Trouble(what="raise", rank=who, step=2))
        assert (found["error"], found["text"]) == ("ValueError", "step 2 does not suit rank 0")
        for path in left.values():
            assert "rank 0 on " in output(path) and "ValueError: step 2 does not suit rank 0" in output(path)


def test_without_rank_0_nobody_stays(tmp_path: Path) -> None:
    folder = str(tmp_path)
    trouble = Trouble(what="kill", rank=0, step=2)
    with pytest.raises(AssertionError, match=r"rank [12] of 3 died .exit code 1."):
        on_ranks(3, caught, free_port(), folder, 3, trouble, timeout_s=300, lost=[0], group=False)
    for rank in (1, 2):
        assert output(tmp_path / f"left-{rank}").startswith("rank 0 on ")


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    found, _ = troubled(tmp_path, Trouble(what="late"), lost=())
    assert found["error"] == "WorkerLost"
    assert "ranks 1, 2 of 3 did not come to 127.0.0.1:" in found["text"]
    assert f"within {TIMEOUT_S:g} s" in found["text"]


# ---- refusals: an answer of all ranks


def refused(rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    """Of three steps the second is refused, by all."""
    place, trouble = local_place(world, port, rank, KEY), Trouble(what="refuse", rank=-1, step=2)
    if rank:
        following(place, lambda reported, ready: Toy(rank, trouble), leaves(folder, rank), ANSWERS)
        return {"ended": True}
    terms = Terms(backend="gloo", timeout_s=TIMEOUT_S, silence_s=SILENCE_S, recipe="")
    with leading(place, meet(place), terms, lambda ready: Toy(rank, trouble), answers=ANSWERS) as trainer:
        batch = batch_of(np.arange(4.0))
        first = trainer.step(batch).metrics
        with pytest.raises(Misaligned, match="step 2 has routes of others"):
            trainer.step(batch)
        time.sleep(GRACE_S + 3)  # no rank is blamed for it
        saved = {"first": first, "failed": trainer.failed, "tensors": dict(trainer.tensors())}
        return saved | {"second": trainer.step(batch).metrics, "counters": trainer.counters()}


def test_what_all_ranks_refuse_leaves_them_as_they_were(tmp_path: Path) -> None:
    found, *others = on_ranks(3, refused, free_port(), str(tmp_path), timeout_s=300, group=False)
    assert found["failed"] == ""
    assert torch.equal(found["tensors"]["value"], torch.arange(4, dtype=torch.float64) * 6 * 3)
    assert found["second"] == found["first"] and found["counters"] == {"steps": 2}
    assert others == [{"ended": True}] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("who", [0, 1])
def test_what_only_some_refuse_ends_all_by_name(tmp_path: Path, who: int) -> None:
    """Rank 1 goes on to wait for the next call, and the others wait for it in theirs; or rank 0 goes on, and
    the others wait for it in the step."""
    found, left = troubled(tmp_path, Trouble(what="refuse", rank=who, step=2))
    if who == 1:
        assert found["error"] == "WorkerLost"
        assert "has refused 1 of its calls where rank 0 refused 0" in found["text"]
        assert found["text"].startswith("rank 1 on ")
        assert output(left[2]) == found["text"]
        return
    assert (found["error"], found["text"]) == ("Misaligned", "step 2 has routes of others")
    for path in left.values():
        assert "rank 0 on " in output(path) or "rank 1 on " in output(path)


class Bandit(BanditTrainer):
    """``follow.Local``: the trainer of ``small_loop``, which refuses the batch of one step."""

    progress = 0.0

    def __init__(self, refuses: int) -> None:
        super().__init__()
        self.steps, self.refuses = 0, refuses

    def step(self, batch: Batch) -> StepReport:
        dist.all_reduce(torch.zeros(1))
        if self.steps + 1 == self.refuses:
            raise Misaligned("routes of others", Diagnosis(cause=Cause.SHIFTED, best=1.0))
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
    place = local_place(world, port, rank, KEY)
    if rank:
        following(place, lambda reported, ready: Bandit(refuses), leaves(folder, rank), ANSWERS)
        return {}
    terms = Terms(backend="gloo", timeout_s=TIMEOUT_S, silence_s=SILENCE_S, recipe="")
    with leading(place, meet(place), terms, lambda ready: Bandit(refuses), answers=ANSWERS) as trainer:
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


# ---- the beginning, and what gets on


def loaded(rank: int, world: int, port: int, folder: str, cold_s: float, fault: str) -> Any:
    """Rank 1 has its part on a cold disk, or not at all."""
    place, bound = local_place(world, port, rank, KEY), timedelta(seconds=4)

    def new(ready: Callable[[], None]) -> Toy:
        if rank == 1:
            time.sleep(cold_s)
            if fault:
                raise ValueError(fault)
        ready()
        dist.new_group(backend="gloo", timeout=bound)
        return Toy(rank)

    if rank:
        following(place, lambda reported, ready: new(ready), leaves(folder, rank))
        return "ended"
    terms = Terms(backend="gloo", timeout_s=bound.total_seconds(), silence_s=3.0, recipe="")
    try:
        with leading(place, meet(place), terms, new) as trainer:
            return trainer.step(batch_of(np.arange(4.0))).metrics["sum"]
    except WorkerLost as lost:
        deadline = time.monotonic() + 120
        while dist.is_initialized() and time.monotonic() < deadline:  # what it left behind, for another run
            time.sleep(0.05)
        return str(lost), dist.is_initialized()


def test_a_cold_load_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    found = on_ranks(2, loaded, free_port(), str(tmp_path), 7.0, "", timeout_s=300, group=False)
    assert found == [np.arange(4.0).sum() * 3 * 2, "ended"]


def test_a_part_that_cannot_be_loaded_is_told_by_name(tmp_path: Path) -> None:
    found, _ = on_ranks(
        2, loaded, free_port(), str(tmp_path), 0.0, "no file", timeout_s=300, lost=[1], group=False
    )
    text, initialised = found
    assert text.startswith("rank 1 on ")
    assert "raised ValueError: no file, last seen in the building of its part" in text
    assert not initialised


def controls(rank: int, world: int, port: int) -> control.Control:
    place = local_place(world, port, rank, KEY)
    store = control.keyed(place, meet(place))
    terms = Terms(backend="gloo", timeout_s=4.0, silence_s=3.0, recipe="")
    members, terms = control.arrive(place, store, None if rank else terms)
    return control.Control(place, store, members, terms)


def not_loaded(rank: int, world: int, port: int) -> str:
    one = controls(rank, world, port)
    try:
        if rank != 1:
            one.built(within_s=1.0)
    except WorkerLost as lost:
        return str(lost)
    return ""


def test_a_part_that_is_not_loaded_in_time_is_told_by_name() -> None:
    found = on_ranks(3, not_loaded, free_port(), timeout_s=300, group=False)
    late = "rank 1 of 3 did not load their part of the model within 1 s; is model.path on a slow disk?"
    assert found == [late, "", "rank 0 did not say within 5 s that all ranks have loaded their part"]


def pieces(rank: int, world: int, port: int) -> int:
    """How far a call has got on when it has come, in pieces of 1000 bytes."""
    control.PIECE = 1000  # of this process alone
    one = controls(rank, world, port)
    if rank == 0:
        one.call("step", np.arange(9000, dtype=np.uint8))
    else:
        assert one.awaited() is not None
    return one.progress


def test_every_piece_of_a_call_gets_on() -> None:
    assert on_ranks(2, pieces, free_port(), timeout_s=300, group=False) == [10, 10]


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
    name = r"ostinato: rank 1 on \S+ \(process \d+\) ended: killed by signal 9, last seen "
    assert re.match(name, output), output
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
