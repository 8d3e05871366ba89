"""Tables and plots of a collapse study, from the lines of its runs, into page.md.

What people wrote on the page stays: only what stands between its two marks is written anew.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import collapse_stats as stats
from collapse import ARMS
from matplotlib import rc_context
from matplotlib.figure import Figure

from lab.harness import Bench, Result, Say, main, markdown, option, written_between
from lab.paired import wilson
from ostinato.run import atomic_write

Row = Mapping[str, Any]
BEGIN, END = "<!-- results: written by collapse_page.py -->", "<!-- end of results -->"
HERE = Path(__file__).parent
COLOURS = ("#222222", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2")
SEEDS = range(10, 15)  # registered in page.md before the first run of the study


def brief(row: Row) -> dict[str, Any]:
    """Of a run's line what the page needs, in a few hundred bytes; of a brief line, itself."""
    if "reward" in row:
        return dict(row)
    steps, measured = row["steps"], row["measured"]
    kept = {
        key: row[key] for key in ("arm", "dose", "seed", "setting", "ended", "before", "after", "seconds")
    }
    return {
        **kept,
        "reward": [None if value is None else round(value, 3) for value in steps["reward"]],
        "collapsed": stats.ended(row),
        "mismatched": stats.mismatch_step(steps[stats.TAIL]),
        "k3_first": steps["k3"][0],
        "measured": [_columns(one) for one in measured],
    }


def _columns(measured: Row) -> list[float | None]:
    """[step, native k3, native F(1.1), replayed k3, replayed F(1.1), share of routers that differ]."""
    found: list[float | None] = [measured["step"]]
    for name in ("native", "replay"):
        arm = measured["arms"].get(name)
        found += [None, None] if arm is None else [_short(arm["k3"]), _short(dict(arm["tails"])[1.1])]
    return [*found, _short(measured["differ"])]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")


def read(file: Path) -> list[dict[str, Any]]:
    """Brief lines of the runs of the last setting in ``file``, of each (arm, dose, seed) the first: files of
    workers that share their beginning may be put together. Raises ValueError where there is none."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [brief(json.loads(line)) for line in lines]
    if not rows:
        raise ValueError(f"--out {file} has no finished run yet; run the study first")
    mine = [row for row in rows if row["setting"] == rows[-1]["setting"]]
    first = {(row["arm"], row["dose"], row["seed"]): row for row in reversed(mine)}
    return list(reversed(first.values()))


def write(
    rows: Sequence[Row],
    folder: Path,
    *,
    dense: Sequence[Row] = (),
    primary: tuple[str, str] = ("R3", "none"),
    seeds: Sequence[int] = SEEDS,
) -> None:
    """page.md, its plots and its data in ``folder``. ``dense``: the same study of a dense model; ``seeds``:
    those that were registered, without all of which the primary comparison is interim."""
    _keep(rows, folder / "collapse.jsonl")
    if dense:
        _keep(dense, folder / "dense.jsonl")
    atomic_write(folder / "survival.svg", survival_plot(rows))
    atomic_write(folder / "reward.svg", reward_plot(rows))
    page = folder / "page.md"
    text = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    parts = [*sections(rows, primary, seeds), dense_control(dense, primary[1], seeds)]
    results = "\n\n".join(part for part in parts if part)
    atomic_write(page, written_between(text, BEGIN, END, results).encode())


def _keep(rows: Sequence[Row], file: Path) -> None:
    ordered = sorted(rows, key=lambda row: (row["seed"], _dose_order(row["dose"]), row["arm"]))
    lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in ordered)
    atomic_write(file, "".join(lines).encode())


def sections(rows: Sequence[Row], primary: tuple[str, str], seeds: Sequence[int]) -> Iterable[str]:
    """The results in Markdown, part by part."""
    yield f"{len(rows)} runs of setting `{rows[0]['setting']}`. {complete(rows, seeds)}"
    yield "### Primary comparison\n\n" + primary_comparison(rows, *primary, seeds)
    yield "### Survival\n\nRuns that did not collapse, of all runs; 95 % Wilson intervals.\n\n" + _table(
        rows, survived
    )
    yield "![survival by step](survival.svg)"
    yield kept_table(rows, primary[1])
    yield (
        "### Final score\n\nHeld-out score of the trainer's own policy after the last step, mean ± standard "
        f"error over seeds (n, where fewer than {len(seeds)}); in brackets, the change against the same "
        "seeds at dose bf16 (and their number, where it is not n).\n\n"
    ) + _table(rows, lambda cell: final(cell, rows, len(seeds)))
    yield difference_table(rows, primary[1])
    yield "![reward by step](reward.svg)"
    yield (
        "### Mismatch\n\nk3 of the first step, before anything was learned (what the arm's trainer sees: "
        "with replay where it replays), median over seeds; in brackets, runs with F(1.5) above 0.1 for 5 "
        "trained steps. `bypass` is measured against the policy in training: its own updates count.\n\n"
    ) + _table(rows, mismatch)
    yield measured_table(rows)


def dense_control(rows: Sequence[Row], against: str, seeds: Sequence[int]) -> str:
    """A dense model under the same doses: what rounded weights do where there is no router to flip."""
    if not rows:
        return ""
    about = (
        f"### Dense control\n\n{len(rows)} runs of a dense model that starts at "
        f"{rows[0]['before']['clean']:.3f}. {complete(rows, seeds)} Survival, and final score as above."
    )
    scores = _table(rows, lambda cell: final(cell, rows, len(seeds)))
    parts = (about, _table(rows, survived), scores, difference_table(rows, against))
    return "\n\n".join(part for part in parts if part)


def complete(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """A sentence or two: which arms have all ``seeds``, and at which doses."""
    doses = doses_of(rows)
    arms_at: dict[tuple[str, ...], list[str]] = {}
    for arm in arms_of(rows):
        full = tuple(dose for dose in doses if not missing(cell_of(rows, arm, dose), seeds))
        arms_at.setdefault(full, []).append(f"`{arm}`")
    told = [
        f"{', '.join(arms)} at {'every dose' if len(full) == len(doses) else ', '.join(full)}"
        for full, arms in arms_at.items()
        if full
    ]
    all_of = (
        f"All {len(seeds)} seeds ({seeds[0]} to {seeds[-1]}) are there for {'; '.join(told) or 'no arm'}."
    )
    cells = sum(bool(cell_of(rows, arm, dose)) for arm in arms_of(rows) for dose in doses)
    whole = sum(len(full) * len(arms) for full, arms in arms_at.items())
    return (
        all_of
        if cells == whole
        else f"{all_of} The other {cells - whole} cells have fewer, and say how many."
    )


def missing(cell: Sequence[Row], seeds: Sequence[int]) -> set[int]:
    return set(seeds) - {row["seed"] for row in cell}


def primary_comparison(rows: Sequence[Row], arm: str, against: str, seeds: Sequence[int]) -> str:
    """One paragraph: survival at the lowest dose at which ``against`` collapses in half of its runs. Its p is
    called interim while a run of ``seeds`` is missing that could change the dose or the counts."""
    doses = doses_of(rows)
    for index, dose in enumerate(doses):
        mine, other = cell_of(rows, arm, dose), cell_of(rows, against, dose)
        lost = sum(row["collapsed"] is not None for row in other)
        if not other or 2 * lost < len(other):
            continue
        alive = [sum(row["collapsed"] is None for row in cell) for cell in (mine, other)]
        p = stats.fisher((alive[0], len(mine)), (alive[1], len(other)))
        decisive = [mine, *(cell_of(rows, against, lower) for lower in doses[: index + 1])]
        interim = "interim " if any(missing(cell, seeds) for cell in decisive) else ""
        return (
            f"The lowest dose at which `{against}` collapses in at least half of its runs is **{dose}**. "
            f"There, {alive[0]} of {len(mine)} runs of `{arm}` survive and {alive[1]} of {len(other)} of "
            f"`{against}` (Fisher's exact test, two-sided {interim}p = {p:.3g})."
        )
    return f"`{against}` collapsed in less than half of its runs at every dose: there is nothing to survive."


def survived(cell: Sequence[Row]) -> str:
    return _share(sum(row["collapsed"] is None for row in cell), len(cell))


def _share(k: int, n: int) -> str:
    low, high = wilson(k, n)
    return f"{k}/{n} ({low:.2f} to {high:.2f})"


def kept_table(rows: Sequence[Row], against: str) -> str:
    """Runs that ended with a good part of what ``against`` reaches without a mismatch: what the rule of the
    reward is blind to is a fall in the last steps. Empty where there is no run to measure by."""
    base = [row["after"]["clean"] for row in cell_of(rows, against, "bf16")]
    if not base:
        return ""
    least = stats.KEPT * sum(base) / len(base)
    about = (
        f"### Kept its score\n\nRuns that end at {least:.3f} or more: half of the mean final score of "
        f"`{against}` at bf16 (n = {len(base)}); 95 % Wilson intervals. Not registered: added after the "
        f"first runs, because the rule above cannot see a fall in the last {stats.AT_LEAST - 1} steps, and "
        f"one that starts within the last {stats.LASTING - 1} needs to last less long.\n\n"
    )
    return about + _table(
        rows, lambda cell: _share(sum(row["after"]["clean"] >= least for row in cell), len(cell))
    )


def final(cell: Sequence[Row], rows: Sequence[Row], seeds: int) -> str:
    """Mean and standard error, n if it is below ``seeds``, and the change from the same seeds at bf16."""
    mean, error = stats.mean_error([row["after"]["clean"] for row in cell])
    parts = [f"{mean:.3f} ± {error:.3f}" if math.isfinite(error) else f"{mean:.3f}"]
    if len(cell) < seeds:
        parts.append(f"n={len(cell)}")
    changes = differences(cell, cell_of(rows, cell[0]["arm"], "bf16"))
    if changes and cell[0]["dose"] != "bf16":
        of = "" if len(changes) == len(cell) else f" of {len(changes)}"
        parts.append(f"({sum(changes) / len(changes):+.3f}{of})")
    return " ".join(parts)


def differences(mine: Sequence[Row], other: Sequence[Row]) -> list[float]:
    """Final scores of ``mine`` minus those of ``other``, over the seeds that both have."""
    by_seed = {row["seed"]: row["after"]["clean"] for row in other}
    return [row["after"]["clean"] - by_seed[row["seed"]] for row in mine if row["seed"] in by_seed]


def difference_table(rows: Sequence[Row], against: str) -> str:
    """Every arm minus ``against``, dose by dose, never pooled; empty where nothing can be paired."""
    lines = []
    for arm in arms_of(rows):
        for dose in doses_of(rows):
            gains = differences(cell_of(rows, arm, dose), cell_of(rows, against, dose))
            if arm != against and gains:
                mean, p = stats.paired(gains)
                below, above = sum(gain < 0 for gain in gains), sum(gain > 0 for gain in gains)
                lines.append([arm, dose, len(gains), f"{mean:+.3f}", below, above, f"{p:.3g}"])
    if not lines:
        return ""
    about = (
        f"### Every arm minus `{against}`\n\nFinal score, seed by seed: mean difference, seeds in which the "
        "arm ends below and above, and the two-sided p of the exact sign-flip test (with n pairs it is "
        "2 / 2^n or more: 0.0625 for five). Described, not tested: no line of this table was chosen in "
        f"advance, and there are {len(lines)} of them."
    )
    head = ("arm", "dose", "pairs", f"arm - {against}", "below", "above", "p")
    return f"{about}\n\n{markdown(head, lines)}"


def mismatch(cell: Sequence[Row]) -> str:
    first = sorted(row["k3_first"] for row in cell if row["k3_first"] is not None)
    broken = sum(row["mismatched"] is not None for row in cell)
    return f"{first[len(first) // 2]:.1e} ({broken}/{len(cell)})" if first else f"? ({broken}/{len(cell)})"


def measured_table(rows: Sequence[Row]) -> str:
    """Native and replayed side by side at the same weights, of the runs in which both were measured. Not of
    the shuffled control: what it replays is not what was sampled."""
    rows, lines = [row for row in rows if not ARMS[row["arm"]].shuffled], []
    for dose in doses_of(rows):
        found = [one for row in rows if row["dose"] == dose for one in row["measured"] if one[3] is not None]
        if found:
            columns = [sorted(one[i] for one in found) for i in range(1, 6)]
            k3, tail, k3_replay, tail_replay, differ = (column[len(column) // 2] for column in columns)
            shown = (f"{k3:.1e}", f"{k3_replay:.1e}", f"{tail:.2e}", f"{tail_replay:.2e}", f"{differ:.3f}")
            lines.append([dose, len(found), *shown])
    if not lines:
        return ""
    head = ("dose", "steps", "k3 native", "k3 replayed", "F(1.1) native", "F(1.1) replayed", "routers differ")
    about = (
        "### Native and replayed, side by side\n\nThe same batch, the same weights, before the step, every "
        "ten steps of every run; medians over all of them, whatever the arm (without `shuffled`)."
    )
    return f"{about}\n\n{markdown(head, lines)}"


def _table(rows: Sequence[Row], tell: Callable[[Sequence[Row]], str]) -> str:
    doses = doses_of(rows)
    lines = []
    for arm in arms_of(rows):
        cells = [cell_of(rows, arm, dose) for dose in doses]
        lines.append([arm, *(tell(cell) if cell else "" for cell in cells)])
    return markdown(["arm", *doses], lines)


def arms_of(rows: Sequence[Row]) -> list[str]:
    return [name for name in ARMS if any(row["arm"] == name for row in rows)]


def doses_of(rows: Sequence[Row]) -> list[str]:
    return sorted({row["dose"] for row in rows}, key=_dose_order)


def _dose_order(dose: str) -> tuple[int, float]:
    kind, _, size = dose.partition(":")
    return ("bf16", "int8", "int4", "noise").index(kind), float(size or 0)


def cell_of(rows: Sequence[Row], arm: str, dose: str) -> list[Row]:
    return [row for row in rows if (row["arm"], row["dose"]) == (arm, dose)]


# ---- plots: a panel per dose, a line per arm


def survival_plot(rows: Sequence[Row]) -> bytes:
    """Share of runs that have not collapsed, by step (Kaplan-Meier)."""

    def line(cell: Sequence[Row]) -> list[tuple[float, float]]:
        curve = stats.survival([row["collapsed"] for row in cell], len(cell[0]["reward"]))
        corners = [(float(curve[0][0]), curve[0][1])]
        for step, share in curve[1:]:
            corners += [(float(step), corners[-1][1]), (float(step), share)]
        return corners

    return _panels(rows, line, "share of runs that have not collapsed, by step", apart=0.01)


def reward_plot(rows: Sequence[Row]) -> bytes:
    """Mean over seeds of the reward's moving mean, by step."""

    def line(cell: Sequence[Row]) -> list[tuple[float, float]]:
        runs = [stats.moving_means(row["reward"]) for row in cell]
        shortest = min(len(run) for run in runs)
        return [(i + 1.0, sum(run[i] for run in runs) / len(runs)) for i in range(shortest)]

    return _panels(rows, line, "reward while training, mean over the seeds there are, by step", apart=0)


def _panels(rows: Sequence[Row], line: Any, title: str, *, apart: float) -> bytes:
    """An SVG. ``line(cell)`` gives the points (step, value in 0 .. 1) of an arm. Each line is drawn ``apart``
    below the one before it, so that lines which coincide are all seen."""
    doses, arms = doses_of(rows), arms_of(rows)
    figure = Figure(figsize=(9, 2.7 * math.ceil(len(doses) / 3)), layout="constrained")
    panels = figure.subplots(math.ceil(len(doses) / 3), 3, sharex=True, sharey=True, squeeze=False).flat
    for panel, dose in zip(panels, doses, strict=False):
        panel.set_title(dose, loc="left", fontsize=9)
        for number, arm in enumerate(arms):
            if cell := cell_of(rows, arm, dose):
                steps, values = zip(*line(cell), strict=True)
                below = [value - apart * number for value in values]
                panel.plot(steps, below, color=COLOURS[number % len(COLOURS)], label=arm, linewidth=1.2)
    known = {
        text: drawn
        for one in figure.axes
        for drawn, text in zip(*one.get_legend_handles_labels(), strict=True)
    }
    figure.legend([known[arm] for arm in arms], arms, loc="outside lower center", ncols=len(arms), fontsize=8)
    figure.suptitle(title, fontsize=10)
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "collapse", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Bench):
    """Write page.md, plots and data from lines of runs."""

    out: Path = option(HERE / "collapse.jsonl", "Lines of runs.")
    dense: Path = option(HERE / "dense.jsonl", "The runs of a dense model, as a control.")
    page: Path = option(HERE, "The folder.")

    def measure(self, say: Say) -> dict[str, Any]:
        rows = read(self.out)
        write(rows, self.page, dense=read(self.dense) if self.dense.exists() else [])
        return {"runs": len(rows)}

    @staticmethod
    def table(result: Result) -> str:
        return f"{result['runs']} runs"


if __name__ == "__main__":
    sys.exit(main("collapse_page.py", Page, sys.argv[1:]))
