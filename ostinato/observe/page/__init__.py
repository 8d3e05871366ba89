"""The one page of a run: page.html with its scripts, which reads rows that it holds or fetches.

    run folder -> rows -> state, rows (JSON) -> embed: one file that opens offline   (ostinato report)
                                             -> serve: fetched as they come          (ostinato report --live)

Nothing is drawn here. What a model, a dataset or a user wrote never becomes markup: data is JSON without
``<``, the scripts set text and never HTML, and the page's own Content-Security-Policy admits its own scripts,
by digest, and no connection but to its own server.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ostinato.inputs import escape_surrogates, parse_json
from ostinato.observe.concerns import concerns, count_faults, failed_rewards, list_checks
from ostinato.observe.costs import cost_tables
from ostinato.observe.figures import (
    commands,
    compare_plan,
    compare_scores,
    count_work,
    describe,
    figures,
    progress,
    status,
    steps_of,
    subtract_runs,
    verdict,
)
from ostinato.observe.gap import compare_arms, describe_gap, gate, select_measured
from ostinato.observe.ledger import summary
from ostinato.observe.rows import Row, RunRows, by_step, thin_rows
from ostinato.observe.samples import Samples, held_out_pairs
from ostinato.observe.stats import estimate, number
from ostinato.observe.timeline import Usage, add_usages, limit_spans, pool_of, usages
from ostinato.render import Renderer
from ostinato.run import RunFolder, atomic_write, to_json

FOLDER = Path(__file__).parent
SCRIPTS = ("uplot.js", "charts.js", "gantt.js", "samples.js", "page.js")
SPANS = 2000  # most of a worker in a file
MARKS = 400  # steps that are marked on the timeline
PICTURES, PICTURE_BYTES = 12, 1_000_000  # most in a file; most of one picture
PNG = b"\x89PNG\r\n\x1a\n"


def write_report(
    runs: Sequence[RunFolder], out: Path | None = None, *, renderer: Renderer | None = None
) -> Path:
    """Write the page of ``runs``, several of them side by side, to ``out`` and return the path: by default
    report.html in the folder of a run, and beside the first of several, whose own page stays. Works for a
    run that goes on, was killed or never began.

    ``renderer`` is the tokenizer of the run's model: with it, sampled tokens are shown as text, one by one;
    without it, by their ids beside the text of the whole turn.
    """
    beside = runs[0].path.resolve().parent / f"report-{len(runs)}-runs.html"
    path = out or (runs[0].report if len(runs) == 1 else beside)
    rows = [RunRows(run).read() for run in runs]
    data: dict[str, Any] = {
        "written": f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
        "runs": [collect_data(one, Samples(one.run.trajectories.path, renderer)) for one in rows],
        "between": list(subtract_runs(rows)),
    }
    if len(runs) == 1:
        data["samples"] = Samples(runs[0].trajectories.path, renderer).packed()
        data["pictures"] = read_pictures(runs[0].path / "pictures")
    atomic_write(path, html(data))
    return path


def html(data: Mapping[str, Any]) -> str:
    """page.html with style, scripts and ``data`` inside."""
    scripts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS}
    parts = {
        **scripts,
        "page.css": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "digests": " ".join(f"'{digest(text)}'" for text in scripts.values()),
        "data": script_json(data),
    }
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([\w.]+)\}\}", lambda match: parts[match[1]], page)


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: no "<" can end it or begin a comment."""
    text = escape_surrogates(to_json(value))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def digest(script: str) -> str:
    """The digest by which a Content-Security-Policy allows an inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


# ---- a run as the page reads it


def collect_data(data: RunRows, samples: Samples) -> dict[str, Any]:
    """All data of a run: ``now``, ``state``, and rows, thinned where there are many."""
    spans = limit_spans(data.spans, SPANS)
    rows = {
        "metrics": [
            (
                {
                    name: (value if isinstance(value, int) else float(f"{value:.6g}"))
                    for name, value in row.items()
                    if isinstance(value, int | float)
                }
            )
            for row in thin_rows(data.metrics)
        ],
        "timeline": [span.to_json() for span in spans],
    }
    coarse = len(spans) < len(data.spans)
    return {**now(data), "state": state(data, samples), "rows": rows, "coarse": coarse}


def now(data: RunRows) -> dict[str, Any]:
    """The data that changes without a new row: status, progress and workers."""
    shown = status(data)
    workers = read_workers(data.run.path / "workers.json", live=shown["tone"] == "live")
    return {"name": data.name, "status": shown, "progress": progress(data), "workers": workers}


def state(data: RunRows, samples: Samples) -> dict[str, Any]:
    """The data computed from rows: the first screen, tables, and short lists of rows."""
    sentence, tone = verdict(data)
    idle, work = use(data)
    plan = compare_plan(data)
    cost = summary(data.logs["ledger"])
    costs = cost_tables({data.name: cost}) if data.logs["ledger"] else []
    tables = {
        "score": [compare_scores(data)] if data.evals else [],
        "gap": compare_arms(data),
        "cost": costs,
        "faults": [count_faults(data)],
        "timeline": [count_work(work)] if work else [],
        "plan": [plan] if plan else [],
    }
    scores = data.scores
    return {
        "figures": [figure._asdict() for figure in figures(data, cost)],
        "verdict": {"text": sentence, "tone": tone},
        "concerns": [concern._asdict() for concern in concerns(data)],
        "looked_at": list_checks(data),
        "commands": commands(data),
        "about": [figure._asdict() for figure in describe(data)],
        "tables": {part: [asdict(table) for table in part_tables] for part, part_tables in tables.items()},
        "gap": describe_gap(data),
        "gate": gate(data),
        "failed": [asdict(reward) for reward in failed_rewards(data.logs["failed_rewards"])],
        "evals": [_add_intervals(row) for row in scores["evals"]],
        "greedy": [_add_intervals(row) for row in scores["greedy"]],
        "downstream": {name: [_add_intervals(row) for row in rows] for name, rows in data.downstream.items()},
        "forecasts": by_step(data.logs["forecast"]),
        "mismatch": select_measured(data),
        "alarms": data.logs["watch"],
        "idle": idle,
        "steps": steps_of(data.logs["ledger"])[-MARKS:],
        "pairs": held_out_pairs(scores["evals"]) or samples.pairs(),
        "recipe": data.recipe_text,
        "max_grad_norm": data.setting("trainer.max_grad_norm"),
        "solved_at": solved_at(data),
    }


def _add_intervals(row: Row) -> dict[str, Any]:
    """A row of eval.jsonl without answers, with the intervals of its scores."""
    estimates = {name: score for name in ("pass@1", "pass@k") if (score := estimate(row, name))}
    fields = {name: value for name, value in row.items() if name != "answers"}
    return {**fields, "intervals": {name: score.interval for name, score in estimates.items()}}


def use(data: RunRows) -> tuple[list[dict[str, float]], Usage | None]:
    """(idle share of each pool by step, usage of all steps together) of the steps in the timeline, which
    omits most steps of a long run."""
    steps = steps_of(data.logs["ledger"])
    step_usages = usages(data.spans, [(start, stop) for _, start, stop in steps])
    used_steps = [
        (step, use) for (step, _, _), use in zip(steps, step_usages, strict=True) if any(use.seconds.values())
    ]
    if not used_steps:
        return [], None
    pools = dict.fromkeys(pool_of(worker) for _, use in used_steps for worker in use.seconds)
    rows = [
        {"step": step} | {pool: share for pool in pools if (share := use.idle(pool)) is not None}
        for step, use in used_steps
    ]
    return rows, add_usages([use for _, use in used_steps])


def solved_at(data: RunRows) -> float:
    """The reward from which an answer counts as solved; by default the sum of all positive weights, which is
    full marks."""
    limit = data.setting("reward.solved_at", "full")
    if isinstance(limit, int | float):
        return limit - 1e-6
    functions = data.setting("reward.functions", ("",))
    weights = data.setting("reward.weights") or [1.0] * len(functions)
    task_functions = (
        next(iter(data.setting("task.mix", ())), {}).get("rewards") or functions
    )  # same for all tasks
    pairs = zip(functions, weights, strict=False)
    return sum(weight for name, weight in pairs if name in task_functions and weight > 0) - 1e-6


# ---- files beside the logs


def read_workers(path: Path, *, live: bool = True) -> list[dict[str, Any]]:
    """The rows of workers.json, with seconds since ``since`` and ``heard``; none if the file is missing or
    not a list. If the run is not ``live``, their states are shown as past ones."""
    try:
        rows = parse_json(path.read_bytes(), surrogates=True)
    except (OSError, ValueError):
        return []
    workers = [dict(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for row in workers:
        for name in ("since", "heard"):
            time_of = number(row, name)
            row[name] = None if time_of is None else max(0.0, time.time() - time_of)
        row["state"] = f"{'' if live else 'was '}{row.get('state', '')}"
    return [row for row in workers if "worker" in row]


def read_pictures(folder: Path) -> dict[str, Any]:
    """PNG files of a run folder: {"shown": [(name, data URL)] by name, "left_out": names with reasons}."""
    shown: list[tuple[str, str]] = []
    left_out: list[str] = []
    for path in sorted(folder.glob("*.png")):
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= PICTURE_BYTES else b""
        if len(shown) == PICTURES or not data.startswith(PNG):
            reason = (
                f"more than {PICTURES}"
                if len(shown) == PICTURES
                else "no PNG"
                if data
                else "too large or empty"
            )
            left_out.append(f"{path.name} ({reason})")
        else:
            shown.append((path.stem, f"data:image/png;base64,{base64.b64encode(data).decode()}"))
    return {"shown": shown, "left_out": left_out}
