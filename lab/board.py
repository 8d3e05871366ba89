"""``ostinato bench board``: what it costs a run that somebody follows it.

Rounds of two runs with the same recipe and seed, one after the other; one of them is followed by an
``ostinato board`` of its own, with the questions of one open page. Both sample the same tokens, so step n of
the one is the work of step n of the other: the ratio of their seconds is taken step by step, of processor
seconds run by run. What the browser does to draw is not in it.
"""

from __future__ import annotations

import http.client
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab.contender import ContenderFailed
from lab.paired import Paired
from lab.settings import machine
from lab.whole_runs import trained

Say = Callable[[str], None]
EVERY_S, REDRAW_S = 1.0, 2.0  # as page/board.js
ANSWER_S = 10.0
RUN_LIMIT_S = 300.0
BAR = 1.01  # a followed step / one that is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``steps`` of each run, of which the first ``warm_up`` are not compared."""

    recipe: str = "quickstart"
    rounds: int = 3
    steps: int = 20
    warm_up: int = 3

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.steps <= self.warm_up:
            raise ValueError(
                f"{self.rounds} rounds of {self.steps} steps leave nothing to compare; use 1 round of "
                f"{self.warm_up + 1} steps or more"
            )

    def overrides(self) -> tuple[str, ...]:
        """Short steps, nothing whose amount of work is decided by a clock, and nothing beside training."""
        return (
            "rollout.prompts_per_step=4",
            f"trainer.steps={self.steps}",
            "trainer.checkpoint_every=0",
            "eval.every=0",
            "eval.at_start=false",
            "draft.enabled=false",
            "forecast.enabled=false",
        )


def run(plan: Plan, say: Say = print) -> dict[str, Any]:
    """Measure, and return the JSON of the command. Raises ContenderFailed where a run does not end well."""
    before, rounds = machine(), list[dict[bool, dict[str, Any]]]()
    with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
        for round_ in range(plan.rounds):
            order = (False, True) if round_ % 2 == 0 else (True, False)
            rounds.append({one: trained_once(plan, Path(root) / f"{round_}-{one:d}", one) for one in order})
            say(_line(round_, rounds[-1]))
    return summary(plan, rounds) | {"machine": before}


def trained_once(plan: Plan, logs: Path, followed: bool) -> dict[str, Any]:
    """A run, and what was followed of it."""
    name, ended, before = f"{logs.name} of the board", threading.Event(), _children_s()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(follow, logs, ended) if followed else None
        try:
            folder = trained(plan.recipe, plan.overrides(), logs, name, limit_s=RUN_LIMIT_S)
            used = _children_s() - before  # a process counts when it has ended: the board has not
        finally:
            ended.set()
        looks = reading.result() if reading else 0
    rows = [row for row in folder.metrics.rows() if row["step"] > plan.warm_up]
    return {
        "step_s": [row["step_time"] for row in rows],
        "work": [[row["reward"], row["completions/mean_length"]] for row in rows],
        "cpu_s": used,
        "board_cpu_s": _children_s() - before - used,
        "looks": looks,
    }


def follow(logs: Path, ended: threading.Event) -> int:
    """Follow the run that comes under ``logs`` until it has ``ended``: how often the page has looked."""
    while not (found := [*logs.glob("*/recipe.toml")]):
        if ended.wait(0.05):
            return 0
    command = [sys.executable, "-m", "ostinato", "board", str(found[0].parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as board:
        try:
            assert board.stdout is not None
            told = board.stdout.readline()  # "board of RUN: http://... (Ctrl-C ends it)"
            if "http://" not in told:
                raise ContenderFailed("ostinato board did not start")
            address = urlsplit("http://" + told.rpartition("http://")[2].split()[0])
            with closing(Page(address.hostname or "", address.port or 0)) as page:
                while not ended.wait(EVERY_S):
                    page.look(time.monotonic())
                return page.looks
        finally:
            board.terminate()


class Page:
    """Asks what the page asks, as often; it reads the answers, and draws nothing."""

    def __init__(self, host: str, port: int) -> None:
        self._board = http.client.HTTPConnection(host, port, timeout=ANSWER_S)  # kept, as a browser does
        self._drawn = -REDRAW_S
        self._seen = {"charts": -1, "timeline": -1}
        self.looks = 0
        self._ask("/answers?verdict=all")

    def look(self, now: float) -> None:
        told = self._ask("/state")["revisions"]
        if now - self._drawn >= REDRAW_S:
            self._drawn = now
            for what, asked in (("charts", "/charts"), ("timeline", "/timeline?seconds=120")):
                if told[what] != self._seen[what]:
                    self._seen[what] = self._ask(asked)["revision"]
        self.looks += 1

    def close(self) -> None:
        self._board.close()

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            self._board.request("GET", path)
            return json.loads(self._board.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ContenderFailed(f"ostinato board does not answer {path}: {error}") from error


def _children_s() -> float:
    """Processor seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- what the runs come to


def summary(plan: Plan, rounds: Sequence[Mapping[bool, Mapping[str, Any]]]) -> dict[str, Any]:
    """Followed against alone: steps, processor seconds; and whether both did the same work."""
    steps = Paired(
        base=tuple(second for one in rounds for second in one[False]["step_s"]),
        other=tuple(second for one in rounds for second in one[True]["step_s"]),
    )
    cpu = Paired(
        base=tuple(one[False]["cpu_s"] for one in rounds), other=tuple(one[True]["cpu_s"] for one in rounds)
    )
    return {
        "step": steps.figures() | {"bar": BAR},
        "cpu": cpu.figures(),
        "same_work": all(one[False]["work"] == one[True]["work"] for one in rounds),
        "board_cpu_s": [round(one[True]["board_cpu_s"], 3) for one in rounds],
        "looks": [one[True]["looks"] for one in rounds],
        "rounds": [{"alone": one[False], "followed": one[True]} for one in rounds],
        "settings": asdict(plan),
    }


def _line(round_: int, one: Mapping[bool, Mapping[str, Any]]) -> str:
    alone, followed = one[False], one[True]
    return (
        f"round {round_}: {sum(alone['step_s']):.2f} s alone, {sum(followed['step_s']):.2f} s followed; "
        f"processor {alone['cpu_s']:.1f} s and {followed['cpu_s']:.1f} s, the board "
        f"{followed['board_cpu_s']:.2f} s in {followed['looks']} looks"
    )


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{what}: followed / alone {found['ratio']:.4f} ({found['low']:.4f} to {found['high']:.4f} over "
        f"{found['rounds']} pairs; {found['base_s']:.3f} s alone)"
        for what, found in (("a step", result["step"]), ("processor seconds", result["cpu"]))
    ]
    cpu = ", ".join(f"{seconds:.2f}" for seconds in result["board_cpu_s"])
    lines.append(f"the board's own processor seconds, start included: {cpu}")
    if not result["same_work"]:
        lines.append("the runs did not sample the same tokens: steps are not pairs")
    return "\n".join(lines)
