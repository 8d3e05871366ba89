"""``ostinato bench kills``: one run, killed with -9 at many random moments, against an undisturbed one.

``ostinato train --restarts`` goes on with it each time, and its next session is killed: so many seconds into
a step, or while it loads. In the end tokens, metrics, scores and adapter have to be those of the undisturbed
run, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.table import Table

from lab.contender import ContenderFailed
from lab.faults import RECIPE, RUN_S, differences, summary_of, undisturbed
from lab.faults_child import Child, Heartbeat, Stopped, alive, child
from lab.harness import Bench, Result, Say, columns, option
from ostinato.lock import LOCK
from ostinato.observe.ledger import Event, read
from ostinato.run import RunFolder

LOADING = 0.3  # share of the early kills that meet a process before its first row


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills(Bench):
    """``late`` of the kills come when more than ``after`` steps are done."""

    kills: int = option(20, "In all.")
    late: int = option(10, "Of the kills: when more than --after steps are done.")
    after: int = option(10, "Steps.")
    steps: int = option(40, "Of the run.")
    checkpoint_every: int = 3
    threads: int = option(1, "Of the run.")
    seed: int = option(0, "Of the run and of the moments.")

    def __post_init__(self) -> None:
        if not 0 <= self.late <= self.kills:
            raise ValueError(f"--late is {self.late}; use 0 to --kills, which is {self.kills}")
        if self.after > self.steps - 3:
            raise ValueError(
                f"--after is {self.after}; use at most --steps less 3, which is {self.steps - 3}"
            )

    def quick(self) -> Kills:
        return replace(self, kills=3, late=1, after=3, steps=6, checkpoint_every=2)

    def measure(self, say: Say) -> dict[str, Any]:
        recipe = (
            *RECIPE,
            *(f"trainer.steps={self.steps}", f"trainer.checkpoint_every={self.checkpoint_every}"),
            *(f"engine.threads={self.threads}", f"seed={self.seed}", "reward.timeout_s=120"),
        )
        heartbeat = Heartbeat()
        with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
            place = Path(root) / "undisturbed"
            wanted = undisturbed(place, heartbeat, recipe)
            (folder,) = (place / "runs").iterdir()
            pace = _pace(RunFolder(folder))
            say(f"the undisturbed run: {_digest(wanted)}, {pace[0]:.1f} s to load, {pace[1]:.2f} s a step")
            with _Killed.open(Path(root) / "killed", recipe, self.kills, pace, heartbeat, say) as killed:
                for moment in moments(self):
                    killed.kill(moment)
                found = killed.finish()
            kills = killed.rows
        differs = differences(found, wanted)
        return {
            "equal": not differs,
            "differs": differs,
            "digests": [_digest(wanted), _digest(found)],
            "late": sum(row["done"] > self.after for row in kills),
            "kills": kills,
        }

    @staticmethod
    def table(result: Result) -> Table:
        verdict = "equal to the undisturbed run" if result["equal"] else f"DIFFERS in {result['differs']}"
        title = f"{len(result['kills'])} kills, {result['late']} of them late: {verdict}"
        rows = ((row["when"], row["done"], f"{row['lived_s']:.1f}") for row in result["kills"])
        title = f"{title} (adapter {result['digests'][1]})"
        return columns(title, ("kill", "steps done", "s lived"), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to kill: ``part`` of the time of a step after so many are done, or of loading (``step`` None)."""

    step: int | None
    part: float


def moments(bench: Kills) -> list[Moment]:
    """In the order in which one run meets them; its first session is not killed while it loads. No two kills
    while it loads are beside each other, and no two after the same step where there are enough: two restarts
    without progress are the last."""
    random = Random(bench.seed)
    early = bench.kills - bench.late
    loading = min(math.ceil(LOADING * early), bench.kills - 1)
    steps = _draw(random, range(bench.after + 1), early - loading)
    steps += _draw(random, range(bench.after + 1, bench.steps - 1), bench.late)
    found = [Moment(step=step, part=random.random()) for step in sorted(steps)]
    for place in sorted(_draw(random, range(1, len(found) + 1), loading), reverse=True):
        found.insert(place, Moment(step=None, part=random.random()))
    return found


def _draw(random: Random, numbers: range, count: int) -> list[int]:
    """``count`` of them, all different where there are so many."""
    few = count <= len(numbers)
    return random.sample(numbers, count) if few else [random.choice(numbers) for _ in range(count)]


def _digest(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(run["adapter"]).hexdigest()[:16]


def _pace(folder: RunFolder) -> tuple[float, float]:
    """Seconds of loading, and of a step."""
    rows = read(folder)
    loading = rows[0]["at"] - rows[0]["process_started"]
    return loading, median(row["seconds"] for row in rows if row["event"] == Event.STEP)


class _Killed:
    """The run whose sessions are killed again and again, in ``place``."""

    def __init__(self, place: Path, process: Child, pace: tuple[float, float], say: Say) -> None:
        self._logs, self._process, self._say = place / "runs", process, say
        self._loading_s, self._step_s = pace
        self._begun, self._last = time.time(), 0  # of the session; the process of the one before
        self.rows: list[dict[str, Any]] = []  # of the kills: when, steps done, seconds lived

    @classmethod
    @contextmanager
    def open(
        cls,
        place: Path,
        recipe: Sequence[str],
        restarts: int,
        pace: tuple[float, float],
        heartbeat: Heartbeat,
        say: Say,
    ) -> Iterator[_Killed]:
        """Begin the run; it has ended when the context does."""
        logs = place / "runs"
        logs.mkdir(parents=True)
        command = ["train", *recipe, f"log.dir={logs}", "--restarts", str(restarts)]
        with child(command, place, logs, heartbeat) as process:
            yield cls(place, process, pace, say)

    def kill(self, moment: Moment) -> None:
        """Kill its session at the moment."""
        if moment.step is None:
            when = moment.part * self._loading_s
            self._wait(lambda: self._holder() != 0)
        else:
            step, when = moment.step, moment.part * self._step_s
            self._wait(lambda: self._done() >= step)
        time.sleep(when)
        self._last = self._holder()
        if not self._last:
            raise ContenderFailed(f"the run ended before it could be killed: {self._process.sentence()!r}")
        os.kill(self._last, signal.SIGKILL)
        lived, self._begun = time.time() - self._begun, time.time()
        done = len(self._process.rows())
        what = "loading" if moment.step is None else f"step {moment.step + 1}"
        self.rows.append({"when": f"{when:.2f} s into {what}", "done": done, "lived_s": lived})
        self._say(f"kill {len(self.rows)}: {self.rows[-1]['when']}, {done} steps were done")

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the run: all that has to be equal."""
        self._wait(lambda: self._process.process.poll() is not None)
        if self._process.process.poll() != 0:
            raise ContenderFailed(f"the run failed after its kills: {self._process.sentence()!r}")
        return summary_of(self._folder)

    @property
    def _folder(self) -> RunFolder:
        (path,) = self._logs.iterdir()
        return RunFolder.open(path)

    def _holder(self) -> int:
        """The process of the session, once it holds the run's lock; 0 before."""
        with suppress(OSError, ValueError):
            holder = json.loads((self._folder.path / LOCK).read_bytes())["pid"]
            return holder if holder != self._last and alive(holder) else 0
        return 0

    def _done(self) -> int:
        """Steps that are done for the session; -1 before its ledger begins. Rows of metrics that it is about
        to do again do not count."""
        if not any(self._logs.glob("*/ledger.jsonl")):
            return -1
        rows = read(self._folder)
        starts = [at for at, row in enumerate(rows) if row["event"] == Event.START]
        if not starts or rows[starts[-1]]["process_started"] < self._begun:
            return -1
        return max(row["step"] for row in rows[starts[-1] :] if "step" in row)

    def _wait(self, condition: Callable[[], bool]) -> None:
        process, limit = self._process, time.monotonic() + RUN_S
        while time.monotonic() < limit:
            with suppress(Stopped):  # a pause of this process does no harm here
                if process.until(condition, RUN_S):
                    return
                raise ContenderFailed(f"the run ended, or hung, too early: {process.sentence()!r}")
            process.forgive()
        raise ContenderFailed(f"the run took longer than {RUN_S:g} s: {process.sentence()!r}")
