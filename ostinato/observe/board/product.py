"""The board of a continual loop: its stage, judge and policy in use, every decision with reasons and cost.

It reads the journal of the loop's folder whenever the page is requested, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ostinato.inputs import escaped
from ostinato.observe.report.page.offline import FOLDER, render
from ostinato.run import Jsonl

JOURNAL = "decisions.jsonl"
# the labels of ``product.loop.Stage``
STAGES = {
    "collect": "Collect",
    "freeze": "Freeze",
    "judge": "Train judge",
    "judge_gates": "Judge's gates",
    "shadow": "Shadow",
    "policy": "Train policy",
    "policy_gates": "Policy's gates",
    "canary": "Canary",
}
GOOD = ("judge promoted", "policy promoted")
FIGURES = 6  # shown for a decision, at most


class ProductBoard:
    """What a board's server needs: ``page``, and no further ``routes``."""

    routes: Mapping[str, Callable[..., dict[str, Any]]] = {}

    def __init__(self, folder: Path) -> None:
        self._folder, self._journal = folder, Jsonl(folder / JOURNAL)

    @property
    def page(self) -> bytes:
        rows = list(self._journal.rows())
        folders = (Path(__file__).parent / "page", FOLDER)
        styles = ("report.css", "product.css")
        page = render(
            "product.html.jinja",
            (),
            folders=folders,
            styles=styles,
            name=self._folder.resolve().name,
            stages=_stages(rows),
            offices=_offices(rows),
            rounds=_rounds(rows),
            decisions=[_decision(row) for row in reversed(rows)],
        )
        return escaped(page).encode()


def _stages(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(label, CSS class) of each stage; the class is "now" for the current one."""
    now = rows[-1]["after"]["stage"] if rows else "collect"
    return [(words, "now" if name == now else "") for name, words in STAGES.items()]


def _offices(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(name, revision in use, since when) of judge and policy."""
    found = []
    for what in ("judge", "policy"):
        revision = rows[-1]["after"][what] if rows else ""
        since = next((row["ts"] for row in reversed(rows) if row["before"][what] != revision), None)
        none = "the model itself" if what == "policy" else "none yet"
        found.append((what, revision or none, _time(since) if revision and since else ""))
    return found


def _rounds(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """For each round: its pairs, the outcomes for judge and policy, and the seconds spent on each."""
    found: dict[int, dict[str, str]] = {}
    seconds: dict[int, dict[str, float]] = {}
    for row in rows:
        number = row["after"]["round"]
        one = found.setdefault(number, {"round": str(number), "pairs": "", "judge": "", "policy": ""})
        figures, stage = row["finding"]["figures"], row["before"]["stage"]
        spent = seconds.setdefault(number, {"judge": 0.0, "policy": 0.0})
        what = "policy" if stage in ("policy", "policy_gates") else "judge"
        if stage in ("judge", "judge_gates", "policy", "policy_gates"):  # the others wait for users
            spent[what] += figures.get("seconds", 0.0)
        if stage == "collect":
            one["pairs"] = f"{figures.get('pairs', 0):.0f}"
        elif stage in ("judge_gates", "shadow"):
            one["judge"] = row["what"]
        elif stage in ("policy", "policy_gates", "canary"):
            one["policy"] = row["what"]
    for number, one in found.items():
        one["seconds"] = " + ".join(
            f"{value:.0f} s {name}" for name, value in seconds[number].items() if value
        )
    return list(reversed(found.values()))


def _decision(row: dict[str, Any]) -> dict[str, Any]:
    figures = {name: value for name, value in row["finding"]["figures"].items() if name != "seconds"}
    shown = [f"{name} {value:.4g}" for name, value in list(figures.items())[:FIGURES]]
    passed = row["finding"]["verdict"] == "passed"
    return {
        "time": _time(row["ts"]),
        "round": row["before"]["round"],
        "stage": STAGES[row["before"]["stage"]],
        "what": row["what"],
        "class": "good" if row["what"] in GOOD else "" if passed else "bad",
        "reasons": row["finding"]["reasons"],
        "figures": ", ".join(shown),
        "seconds": f"{row['finding']['figures'].get('seconds', 0.0):.1f}",
    }


def _time(ts: float) -> str:
    return f"{datetime.fromtimestamp(ts):%Y-%m-%d %H:%M:%S}"
