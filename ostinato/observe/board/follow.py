"""The state of a run in progress, read from its folder, which is never written to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from ostinato.every import Every, spent_in_steps
from ostinato.inputs import parse_json, parse_toml
from ostinato.lock import is_held
from ostinato.observe.board.curves import Curves, charts
from ostinato.observe.board.tail import Tail
from ostinato.observe.ledger import Event
from ostinato.observe.report.facts import estimate, interval_text, seconds_text, si
from ostinato.observe.report.gantt import picture, steps_of
from ostinato.observe.report.reading import Row, RunData, main_scores, number
from ostinato.observe.report.verdicts import failed_rewards, unsolved
from ostinato.observe.timeline import Span
from ostinato.run import RunFolder

AGAIN_S = 0.5  # between two reads of the folder, for all pages together
HORIZON_S = 900.0  # seconds of the timeline that are kept
SPANS = 60_000  # kept of it, at most
LAST = 4 << 20  # bytes of the timeline and the ledger that are read when the board opens
STEPS = 200  # whose ledger rows are kept
ALARMS = 50
EMPTY: dict[str, Any] = {"metrics": (), "evals": (), "ledger": (), "starts": (), "damage": ()}


class Tone(StrEnum):
    GOOD = "good"
    LIVE = "live"
    OPEN = "open"
    BAD = "bad"


class Follower:
    """Reads what is new in a run folder, only when ``look`` is called.

    Not thread-safe.
    """

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._looked = float("-inf")
        self._logs = {
            "metrics": Tail(run.metrics.path),
            "eval": Tail(run.eval.path),
            "watch": Tail(run.watch.path),
            "failed_rewards": Tail(run.failed.path),
            "forecast": Tail(run.forecast.path),
            "ledger": Tail(run.ledger.path, last=LAST),
            "timeline": Tail(run.timeline.path, last=LAST),
        }
        self._curves = Curves()
        self._rows: dict[str, deque[Row]] = {
            name: deque(maxlen=2000) for name in ("eval", "forecast", "failed_rewards")
        }
        self._rows |= {"watch": deque(maxlen=ALARMS), "ledger": deque(maxlen=STEPS)}
        self._spans: deque[Span] = deque(maxlen=SPANS)
        self.revisions: dict[str, int] = {"charts": 0, "timeline": 0}
        self.data = RunData(name=run.path.resolve().name, recipe_text="", recipe={}, **EMPTY)

    def look(self) -> None:
        """Read what is new, unless the last read was less than ``AGAIN_S`` ago."""
        now = self._clock()
        if now - self._looked < AGAIN_S:
            return
        self._looked = now
        self._read_recipe()
        for name, log in self._logs.items():
            anew, rows = log.read()
            if anew or rows:
                self._take(name, rows, anew=anew)
                self.revisions["timeline" if name in ("timeline", "ledger") else "charts"] += 1

    def _read_recipe(self) -> None:
        """Read at every look, as the recipe may change when a run is resumed."""
        with suppress(OSError, ValueError):
            recipe = parse_toml(self._run.recipe.read_text(encoding="utf-8", errors="replace"))
            self.data = replace(self.data, recipe=recipe)

    def _take(self, name: str, rows: Sequence[Row], *, anew: bool) -> None:
        """Add new rows. ``anew``: the log was replaced, as its run went back to a checkpoint."""
        if name == "metrics":
            self._curves = Curves() if anew else self._curves
            for row in rows:
                self._curves.add(row)
            return
        kept = self._spans if name == "timeline" else self._rows[name]
        if anew:
            kept.clear()
        if name == "timeline":
            self._spans += _spans(rows)
            newest = max((span.stop for span in self._spans), default=0.0)
            while self._spans and self._spans[0].stop < newest - HORIZON_S:
                self._spans.popleft()
        else:
            self._rows[name] += rows
        if name == "eval":
            self.data = replace(self.data, **main_scores(self._rows["eval"], self.data.recipe))

    # ---- what the page shows

    def state(self) -> dict[str, Any]:
        """Everything but charts and timeline, whose changes ``revisions`` counts."""
        return {
            "name": self.data.name,
            "status": self.status(),
            "progress": self.progress(),
            "tiles": self.tiles(),
            "workers": workers(self._run.path / "workers.json", live=self.status()["tone"] == Tone.LIVE),
            "alarms": [_alarm(row) for row in reversed(self._rows["watch"])],
            "failed": [asdict(one) for one in failed_rewards(self._rows["failed_rewards"])],
            "forecast": next((str(row.get("sentence", "")) for row in reversed(self._rows["forecast"])), ""),
            "metrics": sorted(self._curves.names),
            "notes": self.notes(),
            "revisions": self.revisions,
        }

    def status(self) -> dict[str, str]:
        """Whether the run is alive or has ended: {"tone", "text"}."""
        last = self._rows["ledger"][-1] if self._rows["ledger"] else {}
        step = int(self._curves.last.get("step", 0))
        if last.get("event") == Event.END:
            why = str(last.get("why", ""))
            tone = Tone.BAD if why.startswith("failed") or why in ("collapsed", "forgot") else Tone.GOOD
            return {"tone": tone, "text": f"{ENDS.get(why, why)}, after step {step}"}
        held = is_held(self._run.path)
        if held is None and "tinker" in self.data.recipe:  # a server's, which holds the folder of its state
            held = is_held(self._run.path.resolve().parents[1])
        if held:
            return {"tone": Tone.LIVE, "text": "running" if step else "running, the first step"}
        if not last:
            return {"tone": Tone.OPEN, "text": "has not begun yet"}
        ends = [end for name in ("at", "ended_at") if (end := number(last, name)) is not None]
        ago = seconds_text(max(0.0, time.time() - max(ends, default=time.time())))
        if held is None:
            return {"tone": Tone.OPEN, "text": f"no process of this machine; its last row came {ago} ago"}
        text = f"it was killed; its last row came {ago} ago"
        again = f"ostinato resume {self._run.path}" if "tinker" not in self.data.recipe else "ostinato tinker"
        return {"tone": Tone.BAD, "text": f"{text}. {again} goes on with it"}

    def progress(self) -> dict[str, Any]:
        """Finished steps, planned steps (None if a budget will end the run before them), the share of the
        run that is done, and an estimate of the time left."""
        last, planned = self._curves.last, self.data.setting("trainer.steps")
        step = int(last.get("step", 0))
        share = min(1.0, step / planned) if isinstance(planned, int) else 0.0
        if budget := self.data.setting("trainer.budget"):
            until = Every.parse(budget, "trainer.budget").part(self.data.setting("trainer.until", 1.0))
            if (spent := min(1.0, until.share(spent_in_steps(step, last)))) > share:
                planned, share = None, spent
        lengths = [one.stop - one.start for one in steps_of(self._rows["ledger"])][-20:]
        left = median(lengths) * step * (1 / share - 1) if lengths and share else 0.0
        return {"step": step, "of": planned, "share": share, "left": seconds_text(left) if left else None}

    def tiles(self) -> list[dict[str, str]]:
        """The latest held-out scores and metrics, as {"name", "value", "note"}."""
        last = self._curves.last
        now = [
            {"name": name, "value": form(last[key]), "note": note}
            for name, key, form, note in TILES
            if key in last
        ]
        held = [
            {"name": name, "value": f"{scored.value:.3f}", "note": f"{interval_text(scored)} {at}".strip()}
            for name, rows, key in (
                ("held-out pass@1", self.data.evals, "pass@1"),
                ("held-out reward", self.data.evals, "reward"),
                ("held-out pass@1, greedy", self.data.greedy, "pass@1"),
            )
            if rows and (scored := estimate(rows[-1], key)) and (at := f"at step {rows[-1]['step']}")
        ]
        return [*held, *now]

    def notes(self) -> list[str]:
        """Caveats about the data shown: a pass@1 that shows nothing, logs still being read, damage."""
        why = unsolved(self.data.evals)
        notes = [f"{why[0].upper()}{why[1:]}."] if why else []
        for name, log in self._logs.items():
            if log.left:
                notes.append(f"{name}.jsonl is being read: {si(log.left)}B are left")
            if log.damaged:
                notes.append(f"{name}.jsonl has a line that is no JSON; what follows it is not shown")
        return notes

    def charts(self, chosen: Sequence[str]) -> list[dict[str, Any]]:
        return charts(self._curves, self.data, chosen)

    def timeline(self, seconds: float) -> dict[str, Any] | None:
        """The picture of the last ``seconds``; None without spans."""
        if not self._spans:
            return None
        stop = max(span.stop for span in self._spans)
        last = [span for span in self._spans if span.stop > stop - seconds]
        start = max(stop - seconds, min(span.start for span in last))
        end = "latest" if self.status()["tone"] == Tone.LIVE else "end"
        return picture(last, start, stop, steps_of(self._rows["ledger"])) | {"end": end}


TILES: Sequence[tuple[str, str, Callable[[float], str], str]] = (
    ("reward", "reward", "{:.3f}".format, ""),
    ("tokens/s", "tokens_per_s", si, ""),
    ("a step", "step_time", seconds_text, ""),
    ("entropy", "entropy", "{:.3g}".format, "nats"),
    ("staleness", "staleness/mean", "{:.2f}".format, "steps"),
    ("abilities kept", "forgetting/kept", "{:.0%}".format, "that are not trained"),
    ("idle", "pipeline/bubble_share", "{:.0%}".format, "of all workers' time"),
    ("sampled", "total/sampled_tokens", si, "tokens in all"),
)
ENDS = {
    "done": "finished",
    "interrupted": "interrupted by Ctrl-C",
    "terminated": "stopped by SIGTERM",
    "collapsed": "stopped: the policy collapsed",
    "forgot": "stopped: the policy was losing what it could do before",
    "solved": "ended: every prompt is solved for good",
    "spent": "ended: the budget is spent",
    "enough": "ended: the rest was not worth its compute",
    "stopped": "ended by on_step",
}


def workers(path: Path, *, live: bool = True) -> list[dict[str, str]]:
    """The rows of workers.json as texts; none if the file is missing or not a list. If the run is not
    ``live``, their states are shown as past ones."""
    rows = _json(path)
    if not isinstance(rows, list):
        return []
    found = [_worker(row) for row in rows if isinstance(row, dict) and "worker" in row]
    return found if live else [{**one, "state": f"was {one['state']}", "tone": Tone.OPEN} for one in found]


LOST = frozenset({"lost", "dead", "failed"})
WELL = frozenset({"alive", "ready", "running", "serving", "idle", "busy"})


def _worker(row: Row) -> dict[str, str]:
    def ago(name: str) -> str:
        at = number(row, name)
        return "" if at is None else seconds_text(max(0.0, time.time() - at))

    def count(name: str) -> str:
        value = number(row, name)
        return "" if value is None else f"{value:,.0f}"

    state = str(row.get("state", ""))
    return {
        "worker": str(row["worker"]),
        "state": state,
        "tone": Tone.BAD if state in LOST else Tone.GOOD if state in WELL else Tone.OPEN,
        "since": ago("since"),
        "heard": ago("heard"),
        "cause": str(row.get("cause") or ""),
        **{name: count(name) for name in ("version", "running", "sampled")},
    }


def _alarm(row: Row) -> dict[str, str]:
    step, since = row.get("step"), row.get("since")
    text = f"step {step}: {row.get('sentence', '')}, since step {since}"
    return {"tone": Tone.BAD if row.get("collapse") else Tone.OPEN, "text": text}


def _spans(rows: Iterable[Row]) -> Iterator[Span]:
    """The spans of ``rows``; rows that are not spans are skipped."""
    for row in rows:
        with suppress(KeyError, ValueError, TypeError):
            yield Span.of(row)


def _json(path: Path) -> Any:
    """The JSON of a file; None if it is missing or cannot be read."""
    try:
        return parse_json(path.read_bytes(), surrogates=True)
    except (OSError, ValueError):
        return None
