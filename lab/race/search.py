"""The best setting of a contender, found axis by axis: those of speed by seconds of a step, those of learning
by seconds to a score. Pure but for what ``trial`` runs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.contender import ContenderFailed
from lab.race.curves import cost_of, rising

PATIENCE = 2.5
LONGEST_S = 900.0  # of any trial
SHARE = 0.75  # of the gain of the best trial so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Values of one name of a setting, the first one to begin with; ``learns``: what is learned depends on
    them."""

    name: str
    values: Sequence[Any]
    learns: bool = False


@dataclass(kw_only=True)
class Search:
    """``trial(setting, learns, limit_s)`` runs one, with scores where it ``learns``; a trial of speed that is
    at work for ``PATIENCE`` times as long as the fastest of its axis before it is given up."""

    trial: Callable[[Mapping[str, Any], bool, float], Mapping[str, Any]]
    say: Callable[[str], None]
    trials: list[dict[str, Any]] = field(default_factory=list)

    def best(self, axes: Sequence[Axis]) -> dict[str, Any]:
        """Raises ContenderFailed where no value of an axis works."""
        setting = {axis.name: axis.values[0] for axis in axes}
        for axis in axes:
            if len(axis.values) > 1:
                setting[axis.name] = self._along(axis, setting)
        return setting

    def _along(self, axis: Axis, setting: Mapping[str, Any]) -> Any:
        worked: dict[Any, Mapping[str, Any]] = {}
        for value in axis.values:
            fastest = min((run["seconds"] for run in worked.values()), default=math.inf)
            limit_s = LONGEST_S if axis.learns else min(LONGEST_S, PATIENCE * fastest)
            if (run := self._run({**setting, axis.name: value}, axis.learns, limit_s)) is not None:
                worked[value] = run
        if not worked:
            raise ContenderFailed(f"no value of {axis.name} works, see above")
        learned = [trial["run"] for trial in self.trials if trial["learns"] and trial["run"] is not None]
        ranks = ranked(worked, learned) if axis.learns else {v: (step_s(run),) for v, run in worked.items()}
        return min(ranks, key=ranks.__getitem__)

    def _run(self, setting: Mapping[str, Any], learns: bool, limit_s: float) -> Mapping[str, Any] | None:
        """From memory where it has been run; None where it fails, which is said."""
        known = next((t for t in self.trials if (t["setting"], t["learns"]) == (setting, learns)), None)
        if known is None:
            known, start = {"setting": dict(setting), "learns": learns, "run": None}, time.monotonic()
            try:
                run = self.trial(setting, learns, limit_s)
                known["run"] = {"seconds": time.monotonic() - start, **run}
            except ContenderFailed as error:
                known["failed"] = str(error)
            self.trials.append(known)
            self.say(f"trial {len(self.trials)}: {_words(setting)}: {_outcome(known)}")
        return known["run"]


def step_s(run: Mapping[str, Any]) -> float:
    """Of the median step; the first one warms up."""
    return statistics.median(run["step_s"][1:] or run["step_s"])


def ranked(
    runs: Mapping[Any, Mapping[str, Any]], known: Sequence[Mapping[str, Any]]
) -> dict[Any, tuple[float, float]]:
    """(wall seconds to ``SHARE`` of the largest gain among all that are ``known``, minus the curve's end) of
    each of ``runs``: a value that is fast and falls back later is not the best of its axis."""
    before = statistics.fmean(run["scores"][0] for run in known)
    target = before + SHARE * (max(rising(run["scores"])[-1] for run in known) - before)
    seconds = {value: cost_of(run, "wall_s", target) for value, run in runs.items()}
    ends = {value: rising(run["scores"])[-1] for value, run in runs.items()}
    return {value: (math.inf if (s := seconds[value]) is None else s, -ends[value]) for value in runs}


def _words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in setting.items())


def _outcome(trial: Mapping[str, Any]) -> str:
    run = trial["run"]
    if run is None:
        return trial["failed"]
    scores = f", scores {[round(score, 3) for score in run['scores']]}" if trial["learns"] else ""
    return f"{step_s(run):.2f} s a step{scores}"
