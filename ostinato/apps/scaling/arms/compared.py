"""The answer of ``ostinato compare`` from finished runs: tables, JSON, charts of their courses and front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from typing import Any

import numpy as np

from ostinato.apps.scaling.answers import Answer, format_interval
from ostinato.apps.scaling.arms.compare import Compared, Line, collect_outcomes, select_ends_at
from ostinato.apps.scaling.gain import Gain, estimate_gains, estimate_ratio, find_compute_to, find_front
from ostinato.apps.scaling.posterior import Interval
from ostinato.tables import NONE, Table, format_compute, format_seconds

OTHER = "As much as the arm with the least has had; between two scores of a run, on the line through them."
NOTE = (
    "Test half of the held-out problems, which no learning rate was chosen by. Intervals: 90 %, paired "
    "bootstrap over problems and seeds. H is the gain over the headroom, the relative reduction of the "
    "error; near the ceiling it is unsteady, so raw and logit gains stand beside it."
)


def build_race_answer(comparison: Compared, budget: str, threshold: float, against: str = "") -> Answer:
    """Build the answer from finished runs, with differences to the arm ``against``, or to the first if that
    has no run. Raises ValueError without a finished run, and for runs on different problems."""
    if not comparison.lines:
        raise ValueError(" ".join(comparison.failed) or "no run has come to its end yet")
    comparison = replace(comparison, lines=sorted(comparison.lines, key=lambda line: line["arm"] != against))
    lines = comparison.lines
    arms = collect_outcomes(lines)
    gains_of = estimate_gains(arms)
    best = max(float(gain.post.median) for gain in gains_of.values())
    target = {name: gain.pre.median + threshold * (best - gain.pre.median) for name, gain in gains_of.items()}
    compute_of = {name: find_compute_to(*average_course(lines, name), target[name]) for name in arms}
    lines_of = {name: [line for line in lines if line["arm"] == name] for name in arms}
    lead = [
        f"{len(arms)} arms, {len(lines)} runs of {budget} each.",
        *(f"{reason}." for reason in comparison.failed),
        *check_sanity(gains_of, lines_of),
    ]
    along = "compute" if budget.endswith("interactions") else "played"
    other_sets = _gain_elsewhere(lines)
    amount = min(line[along][-1] for line in lines)
    gains_at_common = estimate_gains(
        collect_outcomes(lines, lambda line: select_ends_at(line, along, amount))
    )
    all_points, ratios_of = list_points(lines), compute_ratios(lines, threshold)
    result = {
        "budget": budget,
        "swept": comparison.swept,
        "chosen": comparison.chosen,
        "arms": {name: asdict(gain) for name, gain in gains_of.items()},
        "elsewhere": {
            key: {n: asdict(gain) for n, gain in set_gains.items()} for key, set_gains in other_sets.items()
        },
        "same": {
            "along": along,
            "amount": amount,
            "arms": {name: asdict(gain) for name, gain in gains_at_common.items()},
        },
        "compute_to": compute_of,
        "over_first": {
            name: {k: v and asdict(v) for k, v in ratios.items()} for name, ratios in ratios_of.items()
        },
        "front": [list(all_points[n][:2]) for n in find_front([point[:2] for point in all_points])],
        "runs": lines,
    }
    unit = {"compute": "FLOP", "played": "interactions"}[along]
    tables = [
        _build_gains_table(gains_of, lines_of, compute_of, threshold),
        _build_difference_table(gains_of, ratios_of, threshold),
        *(
            _build_changes_table(f"Not trained: {name}", arms, "All of its problems.")
            for name, arms in other_sets.items()
        ),
        _build_changes_table(f"All arms at an equal {format_compute(amount)} {unit}", gains_at_common, OTHER),
        _build_spending_table(lines_of, comparison),
    ]
    return Answer(result=result, lead=lead, tables=[table for table in tables if table.rows])


def _gain_elsewhere(lines: Sequence[Line]) -> dict[str, dict[str, Gain]]:
    """Estimate the gains on the other sets that all runs were scored on, by name, on all of their
    problems."""
    return {
        name: estimate_gains(
            collect_outcomes(lines, lambda run, name=name: np.array(run["others"][name])[[0, -1]])
        )
        for name in lines[0]["others"]
        if all(line["others"].get(name) for line in lines)
    }


def check_sanity(gains_of: Mapping[str, Gain], lines_of: Mapping[str, Sequence[Line]]) -> list[str]:
    """Name controls that gain, and say if arms differ in the share of answers cut off."""
    notes = [
        f"{name} was rewarded at random and gained {format_interval(gain.raw, '{:+.3f}')}: what is gained "
        "without one is elicited, not learned."
        for name, gain in gains_of.items()
        if lines_of[name][0]["control"] == "random reward" and gain.raw.low > 0
    ]
    cut_shares = {
        name: np.mean([line["truncated"] or 0.0 for line in arm_lines])
        for name, arm_lines in lines_of.items()
    }
    if max(cut_shares.values()) - min(cut_shares.values()) > 0.05:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in cut_shares.items())
        notes.append(f"Shares of answers cut by length differ: {shares}.")
    return notes


def average_course(
    lines: Sequence[Line], arm: str, along: str = "compute"
) -> tuple[list[float], list[float]]:
    """Average the compute (or ``along``) and the score on the test half of an arm, at each score that all of
    its runs have."""
    arm_lines = [line for line in lines if line["arm"] == arm]
    count = min(len(run["compute"]) for run in arm_lines)
    compute = np.mean([run[along][:count] for run in arm_lines], axis=0)
    score = np.mean([_score_run(run)[:count] for run in arm_lines], axis=0)
    return compute.tolist(), score.tolist()


def compute_ratios(lines: Sequence[Line], threshold: float) -> dict[str, dict[str, Interval | None]]:
    """Compute ratios to the first arm's run of the same seed, by arm: "gain" per FLOP, and FLOP "to"
    ``threshold`` of the first arm's gain. None if a run gains nothing or does not get there."""
    first, runs = lines[0]["arm"], {(line["arm"], line["seed"]): line for line in lines}

    def measure_run(arm: str, seed: int) -> tuple[float, float]:
        run, base_scores = runs[arm, seed], _score_run(runs[first, seed])
        score, target = _score_run(run), base_scores[0] + threshold * (base_scores[-1] - base_scores[0])
        return (score[-1] - score[0]) / run["compute"][-1], find_compute_to(
            run["compute"], score.tolist(), target
        )

    ratios_of = {}
    for arm in dict.fromkeys(arm for arm, _ in runs):
        seeds = [seed for name, seed in runs if name == arm and (first, seed) in runs]
        pairs = np.array([[measure_run(name, seed) for seed in seeds] for name in (arm, first)]).reshape(
            2, -1, 2
        )
        ratios_of[arm] = {
            key: estimate_ratio(*pairs[:, :, index]) for index, key in enumerate(("gain", "to"))
        }
    return ratios_of


def _score_run(run: Line) -> np.ndarray:
    """Compute the scores of a run on the test half."""
    return np.array(run["each"])[:, ::2].mean(1)


def list_points(lines: Sequence[Line], along: str = "compute") -> list[tuple[float, float, str]]:
    """List (compute or ``along``, score, arm) of all average scores of all arms."""
    arms = dict.fromkeys(line["arm"] for line in lines)
    return [
        (C, score, arm) for arm in arms for C, score in zip(*average_course(lines, arm, along), strict=True)
    ]


def build_curves(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Build charts of the scores of all arms over compute and interactions, in the form of the page. Each has
    the front: scores that no arm beats with as much."""
    return [
        _build_curve("Score over compute", list_points(lines), "# FLOP"),
        _build_curve("Score over interactions", list_points(lines, "played"), "# episodes"),
    ]


def _build_curve(title: str, all_points: Sequence[tuple[float, float, str]], along: str) -> dict[str, Any]:
    steps = sorted({C for C, _, _ in all_points if C > 0})
    best = dict(all_points[n][:2] for n in find_front([point[:2] for point in all_points]))
    arms = {arm: {C: score for C, score, name in all_points if name == arm} for _, _, arm in all_points}
    series = [
        {"label": label, "color": color, "marker": "dot", "values": [scores_at.get(C) for C in steps]}
        for (label, scores_at), color in zip([("front", best), *arms.items()], cycle(COLORS), strict=False)
    ]
    note = "Mean over seeds on the test half; front: no arm has more with as much."
    return {"title": title, "note": note, "steps": steps, "series": series, "log_x": True, "along": along}


COLORS = ("--ink", "--blue", "--teal", "--orange", "--purple", "--red", "--grey", "--gold", "--pink")


def _build_gains_table(
    gains_of: Mapping[str, Gain],
    lines_of: Mapping[str, Sequence[Line]],
    compute_of: Mapping[str, float],
    threshold: float,
) -> Table:
    rows = []
    for name, gain in gains_of.items():
        first, shares = lines_of[name][0], [run["kept"] for run in lines_of[name] if run["kept"] is not None]
        best_cell = f"{first['base_pass_k']:.3f} (k {first['k']:.0f})"
        compute_cell = format_compute(compute_of[name]) if math.isfinite(compute_of[name]) else "not reached"
        kept_cell = f"{np.mean(shares):.0%}" if shares else NONE
        figures = (
            format_interval(gain.pre),
            best_cell,
            format_interval(gain.post),
            format_interval(gain.raw, "{:+.3f}"),
            format_interval(gain.H),
        )
        rows.append(
            (
                f"{name}\n{first['control']}",
                *figures,
                format_interval(gain.logit, "{:+.2f}"),
                compute_cell,
                kept_cell,
            )
        )
    head = (
        "before",
        "best of k",
        "after",
        "raw gain",
        "error reduction H",
        "logit gain",
        f"FLOP to {threshold:.0%}",
        "kept",
    )
    return Table(title="Arm", head=head, rows=rows, note=NOTE)


def _build_changes_table(title: str, gains_of: Mapping[str, Gain], note: str) -> Table:
    rows = [
        (
            name,
            *(format_interval(gain.pre), format_interval(gain.post), format_interval(gain.raw, "{:+.3f}")),
            format_interval(gain.less["raw"], "{:+.3f}") if gain.less else NONE,
        )
        for name, gain in gains_of.items()
    ]
    head = ("before", "after", "change", f"less that of {next(iter(gains_of))}")
    return Table(title=title, head=head, rows=rows, note=note)


def _build_difference_table(
    gains_of: Mapping[str, Gain], ratios_of: Mapping[str, Mapping[str, Interval | None]], threshold: float
) -> Table:
    first = next(iter(gains_of))
    rows = [
        (
            name,
            *(format_interval(gain.less[key], "{:+.3f}") for key in ("post", "raw", "H", "logit")),
            *(format_interval(ratios_of[name][key], "{:.2f}") for key in ("gain", "to")),
        )
        for name, gain in gains_of.items()
        if gain.less
    ]
    ratios = ("gain per FLOP, ratio", f"FLOP to {threshold:.0%} of its gain, ratio")
    return Table(
        title=f"Difference to {first}",
        head=("after", "raw gain", "error reduction H", "logit gain", *ratios),
        rows=rows,
    )


def _build_spending_table(lines_of: Mapping[str, Sequence[Line]], comparison: Compared) -> Table:
    parts, rows = ("sample", "train", "measure"), []
    head = ("lr", "sweep, validation half", "steps", "interactions", *parts, "seconds")
    for name, arm_lines in lines_of.items():
        flops = [float(np.mean([run["flops"][part] for run in arm_lines])) for part in parts]
        steps, interactions, seconds = (
            np.mean([run[key] for run in arm_lines]) for key in (*head[2:4], head[-1])
        )
        sweep_scores = comparison.swept.get(name, {}).items()
        grid = "; ".join(f"{lr:g}: {', '.join(map('{:.3f}'.format, s)) or NONE}" for lr, s in sweep_scores)
        figures = (f"{steps:.0f}", f"{interactions:,.0f}", *map(format_compute, flops))
        rows.append(
            (name, f"{comparison.chosen[name]:g}", grid or NONE, *figures, format_seconds(float(seconds)))
        )
    return Table(title="Spent, FLOP", head=head, rows=rows, words=("sweep, validation half",))
