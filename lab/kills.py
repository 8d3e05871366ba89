"""``ostinato bench kills``: one run, killed with -9 at many random moments, against an undisturbed one.

Each time ``ostinato resume`` goes on with it, and is killed itself: so many seconds into a step, or while it
loads. In the end tokens, metrics, scores and adapter have to be those of the undisturbed run, bit for bit,
and the ledger has to count the seconds of every process.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.table import Table

from lab.contender import ContenderFailed
from lab.faults import RECIPE, RUN_S, differences, summary_of, undisturbed
from lab.faults_child import Child, Heartbeat, Stopped, child
from lab.harness import Bench, Result, Say, columns, option
from ostinato.lock import LOCK
from ostinato.observe.ledger import Event, read, spells
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
            killed = _Killed(Path(root) / "killed", recipe, pace, heartbeat, say)
            for moment in moments(self):
                killed.kill(moment)
            found, kills = killed.finish(), killed.rows()
        differs = differences(found, wanted)
        return {
            "equal": not differs,
            "differs": differs,
            "digests": [_digest(wanted), _digest(found)],
            "late": sum(row["done"] > self.after for row in kills),
            "uncounted_s": max(row["lived_s"] - row["counted_s"] for row in kills),
            "kills": kills,
        }

    @staticmethod
    def table(result: Result) -> Table:
        verdict = "equal to the undisturbed run" if result["equal"] else f"DIFFERS in {result['differs']}"
        title = f"{len(result['kills'])} kills, {result['late']} of them late: {verdict}"
        rows = (
            (row["when"], row["done"], f"{row['lived_s']:.1f}", f"{row['counted_s']:.1f}")
            for row in result["kills"]
        )
        title = f"{title} (adapter {result['digests'][1]})"
        return columns(title, ("kill", "steps done", "s lived", "s counted"), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to kill: ``part`` of the time of a step after so many are done, or of loading (``step`` None)."""

    step: int | None
    part: float


def moments(bench: Kills) -> list[Moment]:
    """In the order in which one run meets them; its first process is not killed while it loads."""
    random = Random(bench.seed)
    early = bench.kills - bench.late
    loading = min(math.ceil(LOADING * early), bench.kills - 1)
    steps = [random.randrange(bench.after + 1) for _ in range(early - loading)]
    steps += [random.randint(bench.after + 1, bench.steps - 2) for _ in range(bench.late)]
    found = [Moment(step=step, part=random.random()) for step in sorted(steps)]
    for _ in range(loading):
        found.insert(random.randint(1, len(found)), Moment(step=None, part=random.random()))
    return found


def _digest(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(run["adapter"]).hexdigest()[:16]


def _pace(folder: RunFolder) -> tuple[float, float]:
    """Seconds of loading, and of a step."""
    rows = read(folder)
    loading = rows[0]["at"] - rows[0]["process_started"]
    return loading, median(row["seconds"] for row in rows if row["event"] == Event.STEP)


class _Killed:
    """The run that is killed again and again, in ``place``."""

    def __init__(
        self, place: Path, recipe: Sequence[str], pace: tuple[float, float], heartbeat: Heartbeat, say: Say
    ) -> None:
        self._place, self._logs, self._heartbeat, self._say = place, place / "runs", heartbeat, say
        self._logs.mkdir(parents=True)
        self._begin = ["train", *recipe, f"log.dir={self._logs}"]
        self._loading_s, self._step_s = pace
        self._rows: list[dict[str, Any]] = []

    def kill(self, moment: Moment) -> None:
        """Begin or resume the run, and kill it at the moment."""
        spawned = time.time()
        with child(self._command(), self._place, self._logs, self._heartbeat) as process:
            if moment.step is None:
                when = moment.part * self._loading_s
                self._wait(process, lambda: self._holder() == process.process.pid)
            else:
                step, when = moment.step, moment.part * self._step_s
                self._wait(process, lambda: self._done(spawned) >= step)
            time.sleep(when)
            if process.process.poll() is not None:
                raise ContenderFailed(f"the run ended before it could be killed: {process.sentence()!r}")
            process.process.kill()
            process.process.wait()
            lived = time.time() - spawned
        done = len(process.rows())
        what = "loading" if moment.step is None else f"step {moment.step + 1}"
        self._rows.append({"when": f"{when:.2f} s into {what}", "done": done, "lived_s": lived})
        self._say(f"kill {len(self._rows)}: {self._rows[-1]['when']}, {done} steps were done")

    def finish(self) -> dict[str, Any]:
        """Resume the run to its end: all that has to be equal."""
        with child(self._command(), self._place, self._logs, self._heartbeat) as process:
            self._wait(process, lambda: process.process.poll() is not None)
            if process.process.poll() != 0:
                raise ContenderFailed(f"the run failed after its kills: {process.sentence()!r}")
        return summary_of(self._folder)

    def rows(self) -> list[dict[str, Any]]:
        """Of the kills: when, how long each process lived, and how much of that the ledger counts."""
        counted = defaultdict[int, float](float)
        for spell in spells(read(self._folder)):
            counted[spell.row["session"]] += spell.gap + spell.seconds
        if len(counted) != len(self._rows) + 1:
            raise ContenderFailed(
                f"the ledger has {len(counted)} sessions of {len(self._rows) + 1} processes"
            )
        return [row | {"counted_s": counted[n]} for n, row in enumerate(self._rows, start=1)]

    @property
    def _folder(self) -> RunFolder:
        (path,) = self._logs.iterdir()
        return RunFolder.open(path)

    def _command(self) -> list[str]:
        return ["resume", str(self._folder.path)] if self._rows else self._begin

    def _holder(self) -> int:
        """The process that holds the run's lock, or did."""
        with suppress(OSError, ValueError):
            return json.loads((self._folder.path / LOCK).read_bytes())["pid"]
        return 0

    def _done(self, since: float) -> int:
        """Steps that are done for the process that has begun ``since``; -1 before its ledger begins. Rows of
        metrics that it is about to do again do not count."""
        if not any(self._logs.glob("*/ledger.jsonl")):
            return -1
        rows = read(self._folder)
        starts = [at for at, row in enumerate(rows) if row["event"] == Event.START]
        if not starts or rows[starts[-1]]["process_started"] < since:
            return -1
        return max(row["step"] for row in rows[starts[-1] :] if "step" in row)

    def _wait(self, process: Child, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + RUN_S
        while time.monotonic() < limit:
            with suppress(Stopped):  # a pause of this process does no harm here
                if process.until(condition, RUN_S):
                    return
                raise ContenderFailed(f"the run ended, or hung, too early: {process.sentence()!r}")
            process.forgive()
        raise ContenderFailed(f"the run took longer than {RUN_S:g} s: {process.sentence()!r}")
