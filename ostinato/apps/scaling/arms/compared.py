"""What ``ostinato compare`` shows of finished runs: tables, JSON, and charts of their courses and front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from typing import Any

import numpy as np

from ostinato.apps.scaling.answers import Answer, both
from ostinato.apps.scaling.arms.compare import Compared, Line, ends_at, outcomes
from ostinato.apps.scaling.gain import Gain, compute_to, front, gains, ratio
from ostinato.apps.scaling.posterior import Interval
from ostinato.tables import NONE, Table, compute_text, seconds_text

OTHER = "As much as the arm with the least has had; between two scores of a run, on the line through them."
NOTE = (
    "Test half of the held-out problems, which no learning rate was chosen by. Intervals: 90 %, paired "
    "bootstrap over problems and seeds. H is the gain over the headroom, the relative reduction of the "
    "error; near the ceiling it is unsteady, so raw and logit gains stand beside it."
)


def answer(of: Compared, budget: str, threshold: float, against: str = "") -> Answer:
    """What finished runs show, less the arm ``against`` (the first one). ValueError where none has ended."""
    if not of.lines:
        raise ValueError(" ".join(of.failed) or "no run has come to its end yet")
    of = replace(of, lines=sorted(of.lines, key=lambda one: one["arm"] != against))
    arms = outcomes(of.lines)
    found = gains(arms)
    best = max(float(one.post.median) for one in found.values())
    target = {name: one.pre.median + threshold * (best - one.pre.median) for name, one in found.items()}
    reached = {name: compute_to(*mean_course(of.lines, name), target[name]) for name in arms}
    mine = {name: [line for line in of.lines if line["arm"] == name] for name in arms}
    lead = [
        f"{len(arms)} arms, {len(of.lines)} runs of {budget} each.",
        *(f"{why}." for why in of.failed),
        *sanity(found, mine),
    ]
    along = "compute" if budget.endswith("interactions") else "played"
    elsewhere, common = _elsewhere(of.lines), min(line[along][-1] for line in of.lines)
    same = gains(outcomes(of.lines, lambda one: ends_at(one, along, common)))
    over = per_flop(of.lines, threshold)
    result = {
        "budget": budget,
        "swept": of.swept,
        "chosen": of.chosen,
        "arms": {name: asdict(one) for name, one in found.items()},
        "elsewhere": {key: {n: asdict(one) for n, one in some.items()} for key, some in elsewhere.items()},
        "same": {"along": along, "amount": common, "arms": {name: asdict(one) for name, one in same.items()}},
        "compute_to": reached,
        "over_first": {name: {k: v and asdict(v) for k, v in one.items()} for name, one in over.items()},
        "front": [list(points(of.lines)[n][:2]) for n in front([point[:2] for point in points(of.lines)])],
        "runs": of.lines,
    }
    unit = {"compute": "FLOP", "played": "interactions"}[along]
    tables = [
        _gains_table(found, mine, reached, threshold),
        _less(found, over, threshold),
        *(_changes(f"Not trained: {name}", arms, "All of its problems.") for name, arms in elsewhere.items()),
        _changes(f"All arms at an equal {compute_text(common)} {unit}", same, OTHER),
        _spending_table(mine, of),
    ]
    return Answer(result=result, lead=lead, tables=[table for table in tables if table.rows])


def _elsewhere(lines: Sequence[Line]) -> dict[str, dict[str, Gain]]:
    """What became of other sets, by their name, and all of their problems."""
    return {
        name: gains(outcomes(lines, lambda one, name=name: np.array(one["others"][name])[[0, -1]]))
        for name in lines[0]["others"]
        if all(line["others"].get(name) for line in lines)
    }


def sanity(found: Mapping[str, Gain], mine: Mapping[str, Sequence[Line]]) -> list[str]:
    """A control that gains is named; so are arms whose answers were cut off unlike others'."""
    notes = [
        f"{name} was rewarded at random and gained {both(one.raw, '{:+.3f}')}: what is gained without one "
        "is elicited, not learned."
        for name, one in found.items()
        if mine[name][0]["control"] == "random reward" and one.raw.low > 0
    ]
    cut = {name: np.mean([one["truncated"] or 0.0 for one in some]) for name, some in mine.items()}
    if max(cut.values()) - min(cut.values()) > 0.05:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in cut.items())
        notes.append(f"Shares of answers cut by length differ: {shares}.")
    return notes


def mean_course(lines: Sequence[Line], arm: str, along: str = "compute") -> tuple[list[float], list[float]]:
    """(mean compute, mean score on the test half) of an arm at each of its scores."""
    mine = [line for line in lines if line["arm"] == arm]
    count = min(len(one["compute"]) for one in mine)
    compute = np.mean([one[along][:count] for one in mine], axis=0)
    score = np.mean([_scores(one)[:count] for one in mine], axis=0)
    return compute.tolist(), score.tolist()


def per_flop(lines: Sequence[Line], threshold: float) -> dict[str, dict[str, Interval | None]]:
    """By arm: "gain" per FLOP, and FLOP "to" ``threshold`` of the first arm's gain, over those of the first
    arm's run of the same seed. None where a run gains nothing or does not get there."""
    first, runs = lines[0]["arm"], {(line["arm"], line["seed"]): line for line in lines}

    def figures(arm: str, seed: int) -> tuple[float, float]:
        one, base = runs[arm, seed], _scores(runs[first, seed])
        score, target = _scores(one), base[0] + threshold * (base[-1] - base[0])
        return (score[-1] - score[0]) / one["compute"][-1], compute_to(one["compute"], score.tolist(), target)

    found = {}
    for arm in dict.fromkeys(arm for arm, _ in runs):
        seeds = [seed for name, seed in runs if name == arm and (first, seed) in runs]
        each = np.array([[figures(name, seed) for seed in seeds] for name in (arm, first)]).reshape(2, -1, 2)
        found[arm] = {key: ratio(*each[:, :, at]) for at, key in enumerate(("gain", "to"))}
    return found


def _scores(one: Line) -> np.ndarray:
    """Of a run on the test half."""
    return np.array(one["each"])[:, ::2].mean(1)


def points(lines: Sequence[Line], along: str = "compute") -> list[tuple[float, float, str]]:
    """(compute, score, arm) of all arms."""
    arms = dict.fromkeys(line["arm"] for line in lines)
    return [(C, score, arm) for arm in arms for C, score in zip(*mean_course(lines, arm, along), strict=True)]


def curves(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The scores of all arms over compute and interactions, and the fronts (what no arm beats with as much),
    in the form that the page draws."""
    return [
        _curve("Score over compute", points(lines), "# FLOP"),
        _curve("Score over interactions", points(lines, "played"), "# episodes"),
    ]


def _curve(title: str, every: Sequence[tuple[float, float, str]], along: str) -> dict[str, Any]:
    steps = sorted({C for C, _, _ in every if C > 0})
    best = dict(every[n][:2] for n in front([one[:2] for one in every]))
    arms = {arm: {C: score for C, score, name in every if name == arm} for _, _, arm in every}
    series = [
        {"label": label, "color": color, "marker": "dot", "values": [known.get(C) for C in steps]}
        for (label, known), color in zip([("front", best), *arms.items()], cycle(COLORS), strict=False)
    ]
    note = "Mean over seeds on the test half; front: no arm has more with as much."
    return {"title": title, "note": note, "steps": steps, "series": series, "log_x": True, "along": along}


COLORS = ("--ink", "--blue", "--teal", "--orange", "--purple", "--red", "--grey", "--gold", "--pink")


def _gains_table(
    found: Mapping[str, Gain],
    mine: Mapping[str, Sequence[Line]],
    reached: Mapping[str, float],
    threshold: float,
) -> Table:
    rows = []
    for name, one in found.items():
        first, kept = mine[name][0], [each["kept"] for each in mine[name] if each["kept"] is not None]
        best_of = f"{first['base_pass_k']:.3f} (k {first['k']:.0f})"
        to = compute_text(reached[name]) if math.isfinite(reached[name]) else "not reached"
        left = f"{np.mean(kept):.0%}" if kept else NONE
        figures = (both(one.pre), best_of, both(one.post), both(one.raw, "{:+.3f}"), both(one.H))
        rows.append((f"{name}\n{first['control']}", *figures, both(one.logit, "{:+.2f}"), to, left))
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


def _changes(title: str, found: Mapping[str, Gain], note: str) -> Table:
    rows = [
        (
            name,
            *(both(one.pre), both(one.post), both(one.raw, "{:+.3f}")),
            both(one.less["raw"], "{:+.3f}") if one.less else NONE,
        )
        for name, one in found.items()
    ]
    head = ("before", "after", "change", f"less that of {next(iter(found))}")
    return Table(title=title, head=head, rows=rows, note=note)


def _less(
    found: Mapping[str, Gain], over: Mapping[str, Mapping[str, Interval | None]], threshold: float
) -> Table:
    first = next(iter(found))
    rows = [
        (
            name,
            *(both(one.less[key], "{:+.3f}") for key in ("post", "raw", "H", "logit")),
            *(both(over[name][key], "{:.2f}") for key in ("gain", "to")),
        )
        for name, one in found.items()
        if one.less
    ]
    ratios = ("gain per FLOP, ratio", f"FLOP to {threshold:.0%} of its gain, ratio")
    return Table(
        title=f"Difference to {first}",
        head=("after", "raw gain", "error reduction H", "logit gain", *ratios),
        rows=rows,
    )


def _spending_table(mine: Mapping[str, Sequence[Line]], of: Compared) -> Table:
    parts, rows = ("sample", "train", "measure"), []
    head = ("lr", "sweep, validation half", "steps", "interactions", *parts, "seconds")
    for name, some in mine.items():
        flops = [float(np.mean([one["flops"][part] for one in some])) for part in parts]
        steps, played, seconds = (np.mean([one[key] for one in some]) for key in (*head[2:4], head[-1]))
        swept = of.swept.get(name, {}).items()
        grid = "; ".join(f"{lr:g}: {', '.join(map('{:.3f}'.format, s)) or NONE}" for lr, s in swept)
        figures = (f"{steps:.0f}", f"{played:,.0f}", *map(compute_text, flops))
        rows.append((name, f"{of.chosen[name]:g}", grid or NONE, *figures, seconds_text(float(seconds))))
    return Table(title="Spent, FLOP", head=head, rows=rows, words=("sweep, validation half",))
