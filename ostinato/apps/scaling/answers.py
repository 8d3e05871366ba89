"""The answers of ``ostinato scale``: sentences, tables, one JSON object.

Intervals of a curve that is not identified have no median, and a curve that refutes the model has no
intervals (``Assessment.find_interval``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ostinato.apps.scaling.ablation import ENOUGH, FAMILY, FLOOR, Ablation, Arm, Run, Verdict, ablate
from ostinato.apps.scaling.decide import Terms, decide, find_rival, forecast, reach
from ostinato.apps.scaling.gates import REPORTED, Assessment, assess
from ostinato.apps.scaling.posterior import Interval, Posterior, posterior
from ostinato.apps.scaling.reading import Window
from ostinato.observe.costs import cost_tables, is_torn
from ostinato.observe.ledger import read, set_price, summary
from ostinato.run import RunFolder
from ostinato.tables import NONE, Table, format_compute

TORN = "The last line of its ledger was torn by a kill and is not counted."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a command, for people (sentences, then tables) and for machines."""

    result: Mapping[str, Any]  # the JSON object; NaN and infinity become null
    lead: Sequence[str] = ()
    tables: Sequence[Table] = ()
    exit_code: int = 0


def format_ends(interval: Interval | None, form: str = "{:.3f}") -> str:
    """Format the ends of an interval: "[0.597, 0.622]"; a dash for None. ``form`` of "" is for compute."""
    return NONE if interval is None else f"[{_format(interval.low, form)}, {_format(interval.high, form)}]"


def format_median(interval: Interval | None, form: str = "{:.3f}") -> str:
    """Format the median of an interval; a dash without an interval or a median."""
    return NONE if interval is None or math.isnan(interval.median) else _format(interval.median, form)


def format_interval(interval: Interval | None, form: str = "{:.3f}") -> str:
    """Format the median and the ends of an interval; a dash for None."""
    return NONE if interval is None else f"{format_median(interval, form)} {format_ends(interval, form)}"


def _format(value: float, form: str) -> str:
    return form.format(value) if form and math.isfinite(value) else format_compute(value)


def _as_dict(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else asdict(interval)


# ---- one curve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurveEstimate:
    """A window, its posterior, and which of its figures may be reported."""

    window: Window
    posterior: Posterior
    assessment: Assessment

    @classmethod
    def of(cls, window: Window) -> CurveEstimate:
        """Compute the posterior of a window. Raises ValueError for fewer than 3 evaluations."""
        window_posterior = posterior(window.fitted)
        return cls(window=window, posterior=window_posterior, assessment=assess(window_posterior))

    @property
    def ranked(self) -> bool:
        """Whether there is a point estimate."""
        return self.assessment.standing in REPORTED

    @property
    def name(self) -> str:
        return self.window.whole.name

    def rival(self) -> str:
        """Return the sentence for a curve that a line in ln C predicted better; "" if none did, or without a
        point estimate."""
        line = find_rival(self.window.fitted) if self.ranked else None
        return "" if line is None else line.sentence

    def parameters(self) -> dict[str, Interval | None]:
        """Return the intervals of A, B and C_mid as far as they may be reported. B and C_mid have no median
        if they are not identified."""
        draws = {"A": self.posterior.A, "B": self.posterior.B, "C_mid": self.posterior.C_mid}
        intervals = {name: self.assessment.find_interval(values) for name, values in draws.items()}
        if not self.assessment.steep:
            intervals |= {name: value and value.ends() for name, value in intervals.items() if name != "A"}
        return intervals

    def as_json(self) -> dict[str, Any]:
        """Return the keys with which every JSON object about one curve begins."""
        series, assessment = self.posterior.series, self.assessment
        return {
            "series": self.name,
            "axis": series.axis,
            "held_out": series.held_out,
            "evaluations": len(series),
            "window": [float(series.compute[0]), float(series.compute[-1])],
            "R0": series.R0,
            "R0_stderr": series.R0_stderr,
            "standing": assessment.standing,
            "reason": assessment.reason,
            "flags": list(assessment.flags),
            "C_max_over_C_mid": assessment.ratio if assessment.steep else None,
            **{name: _as_dict(value) for name, value in self.parameters().items()},
        }

    def sentences(self) -> list[str]:
        """Say whether the curve is identified and why, what was fitted, and which flags it has."""
        assessment, series, window = self.assessment, self.posterior.series, self.window
        excluded_count = len(window.whole) - len(series)
        ends = f"{format_compute(series.compute[0])} to {format_compute(series.compute[-1])} {window.unit}"
        parts = [f"{len(series)} evaluations from {ends}"]
        parts += [f"{excluded_count} outside of --cut and --until left out"] * bool(excluded_count)
        parts += [f"{series.unmeasured} without a score left out"] * bool(series.unmeasured)
        sentences = [f"{self.name} is {assessment.standing}: {assessment.reason}."]
        sentences.append(f"Fitted: {', '.join(parts)}.")
        sentences += [TORN] * bool(window.run and is_torn(RunFolder.open(window.run)))
        return sentences + [f"Flags: {', '.join(assessment.flags)}."] * bool(assessment.flags)


def answer_fit(window: Window) -> Answer:
    """Answer with the curve, the interval of its ceiling, and whether a line would have predicted better.
    Raises ValueError for fewer than 3 evaluations."""
    estimate = CurveEstimate.of(window)
    least_fit, rival_sentence = estimate.posterior.fit, estimate.rival()
    unknown = () if estimate.assessment.steep else ("B", "C_mid")
    curve = {
        name: None if name in unknown else getattr(least_fit.curve, name) for name in ("A", "B", "C_mid")
    }
    least_squares = curve | {"sse": least_fit.sse, "sd": least_fit.residual_sd} if estimate.ranked else None
    return Answer(
        result=estimate.as_json() | {"least_squares": least_squares, "rival": rival_sentence or None},
        lead=[*estimate.sentences(), *filter(None, [rival_sentence])],
        tables=[_build_parameter_table(estimate, curve if estimate.ranked else {})],
    )


def _build_parameter_table(estimate: CurveEstimate, least_squares: Mapping[str, float | None]) -> Table:
    """Build the table of A, B, C_mid and R0; ``least_squares``: the values of the least-squares curve."""
    series, intervals = estimate.posterior.series, estimate.parameters()
    kinds = {
        "A": ("score; the ceiling", "{:.3f}", "{:.4f}"),
        "B": ("no unit; steepness in ln C", "{:.2f}", "{:.3f}"),
        "C_mid": (f"{estimate.window.unit}; half of the gain", "", ""),
    }
    rows = [
        (
            f"{name}\n{note}",
            format_median(intervals[name], form),
            format_ends(intervals[name], form),
            NONE if (value := least_squares.get(name)) is None else _format(value, fine),
        )
        for name, (note, form, fine) in kinds.items()
    ]
    error = f" ± {series.R0_stderr:.3f}" if series.R0_stderr else ""
    rows.append(("R0\nscore; before training", f"{series.R0:.3f}{error}", "measured", NONE))
    return Table(title=estimate.name, head=("median", "90 % interval", "least squares"), rows=rows)


def answer_forecasts(window: Window, at: Sequence[float], targets: Sequence[float]) -> Answer:
    """Answer with scores at given computes, and computes at which given scores are reached. Raises ValueError
    for a target outside (0, 1), and for fewer than 3 evaluations."""
    for target in targets:
        if not 0 < target < 1:
            raise ValueError(f"--target is {target:g}; use a score between 0 and 1")
    estimate = CurveEstimate.of(window)
    scores = [forecast(estimate.posterior, C) for C in at]
    reaches = [reach(estimate.posterior, T) for T in targets]
    now, unit, rival_sentence = float(window.fitted.compute[-1]), window.unit, estimate.rival()
    rows = []
    for prediction in scores:
        gain = estimate.assessment.find_interval(estimate.posterior.gain(now, prediction.compute))
        cells = (
            format_median(prediction.score),
            format_ends(prediction.score),
            format_ends(prediction.measured),
            format_ends(gain, "{:+.3f}"),
        )
        rows.append((f"{format_compute(prediction.compute)} {unit}\nscore", *cells))
    columns = ("median", "90 % interval", "of one evaluation", f"gain on {format_compute(now)}")
    tables = [Table(title="Score at", head=columns, rows=rows)] if scores else []
    rows = [
        (
            f"{goal.target:.3f}\n{unit}",
            NONE if goal.probability is None else f"{goal.probability:.0%}",
            format_median(goal.compute, ""),
            format_ends(goal.compute, ""),
        )
        for goal in reaches
    ]
    head = ("P(A above it)", "compute, median", "90 % interval")
    tables += [Table(title="Target", head=head, rows=rows)] if reaches else []
    result = {
        "at": [
            {
                "compute": prediction.compute,
                "score": _as_dict(prediction.score),
                "measured": _as_dict(prediction.measured),
            }
            for prediction in scores
        ],
        "targets": [
            {"target": goal.target, "probability": goal.probability, "compute": _as_dict(goal.compute)}
            for goal in reaches
        ],
        "rival": rival_sentence or None,
    }
    return Answer(
        result=estimate.as_json() | result,
        lead=[*estimate.sentences(), *filter(None, [rival_sentence])],
        tables=tables,
    )


def answer_decision(window: Window, terms: Terms) -> Answer:
    """Answer whether to go on or to stop, or that it is undecided; each has its exit code. Raises ValueError
    for a budget that is spent, and for fewer than 3 evaluations."""
    estimate = CurveEstimate.of(window)
    decision = decide(estimate.posterior, terms)
    remaining = terms.budget - float(window.fitted.compute[-1])
    least, price = f"{terms.min_gain:.3f}", f"{terms.price * remaining:.3f}"
    rows = [
        ("gain of the rest\nscore", format_median(decision.gain), format_ends(decision.gain), least, price)
    ]
    columns = ("median", "80 % interval", "least gain", "price of the rest")
    note = f"From {format_compute(terms.budget - remaining)} to {format_compute(terms.budget)} {window.unit}."
    result = {
        "action": decision.action,
        "exit_code": decision.action.exit_code,
        "why": decision.reason,
        "gain": _as_dict(decision.gain),
        "rival": decision.rival or None,
        **asdict(terms),
    }
    lead = [f"{decision.action.capitalize()}: {decision.reason}.", *estimate.sentences()]
    return Answer(
        result=estimate.as_json() | result,
        lead=[*lead, *filter(None, [decision.rival])],
        tables=[Table(title=estimate.name, head=columns, rows=rows, note=note)],
        exit_code=decision.action.exit_code,
    )


# ---- several curves and a reference


def answer_comparison(windows: Sequence[Window]) -> Answer:
    """Answer with a comparison of each run with the first: an ablation of one seed per arm."""
    runs = [Run(arm=window.whole.name, seed=0, series=window.fitted) for window in windows]
    study = ablate(runs, reference=windows[0].whole.name)
    unit = windows[0].unit
    return Answer(
        result=describe_study(study),
        lead=write_study_sentences(study),
        tables=build_study_tables(study, unit),
    )


def format_verdict(arm: Arm) -> str:
    """Format a verdict: "moves A (down)", "moves only B (up) and C_mid (down)", "no difference seen"."""
    if not arm.moves:
        return str(arm.verdict)
    directions = [f"{name} ({'down' if arm.lower[name] > 0.5 else 'up'})" for name in arm.moves]
    return f"moves {'only ' if arm.verdict is Verdict.MOVES_EFFICIENCY else ''}{' and '.join(directions)}"


def write_study_sentences(study: Ablation) -> list[str]:
    """Say which arms are not ranked, and how far runs differ by their seed alone."""
    tau, freedom = study.spread["A"], sum(len(arm.seeds) - 1 for arm in study.arms if arm.ranked)
    addition = ", so the three runs of the paper are counted too" if freedom < ENOUGH else ""
    return [
        *(f"{arm.name} is not ranked: {arm.reason}." for arm in study.arms if arm.reason),
        f"From seed to seed A has a standard deviation of {tau.median:.3f} {format_ends(tau)}, by {freedom}"
        f" degrees of freedom of all arms together{addition}.",
    ]


def build_study_tables(study: Ablation, unit: str) -> list[Table]:
    """Build tables of ceilings and, where B of any arm is identified, of efficiency;
    ``ablation.decide_verdict`` has the rule of verdicts."""
    first_name, compute = study.arms[0].name, format_compute(study.common)

    def format_probability(arm: Arm, name: str) -> str:  # draws are too few for probabilities below 0.1 %
        p = arm.lower.get(name)
        return NONE if p is None else "<0.1%" if p < 0.001 else ">99.9%" if p > 0.999 else f"{p:.1%}"

    ceilings = [
        (
            arm.name,
            str(len(arm.seeds)),
            format_interval(arm.A),
            format_interval(arm.A_less, "{:+.3f}"),
            format_probability(arm, "A"),
            format_interval(arm.reached)
            + (f" at {format_compute(arm.reached_at)}" if arm.reached_at < study.common else ""),
            format_verdict(arm),
        )
        for arm in study.arms
    ]
    head = ("runs", "A", f"less that of {first_name}", "P(A lower)", f"score at {compute}", "verdict")
    note = (
        f"Intervals: 90 %, of the mean over seeds. A verdict on A is beyond {study.tail:.2%} on either side:"
        f" any of {len(study.arms) - 1} arms is reported to move A where none does with {FAMILY:.0%} at most,"
        f" and B or C_mid (at one A, within {FLOOR:g}) as often again. No difference seen is not none: the"
        f" interval says how large it may be. Score at {compute} {unit}: as measured just before, no curve."
    )
    tables = [Table(title="Arm", head=head, rows=ceilings, note=note)]
    if not any(arm.steep for arm in study.arms):
        return tables
    efficiency = [
        (
            arm.name,
            format_interval(arm.B, "{:.2f}"),
            format_interval(arm.B_shared, "{:.2f}"),
            format_probability(arm, "B"),
            format_interval(arm.C_mid, ""),
            format_interval(arm.C_mid_ratio, "{:.2f}"),
            format_probability(arm, "C_mid"),
        )
        for arm in study.arms
    ]
    condition = "" if study.shared_A is None else f" at A = {study.shared_A:.3f}"
    head = ("B", f"B{condition}", "P(B lower)", "C_mid", f"over that of {first_name}", "P(C_mid lower)")
    note = (
        f"C_mid in {unit}: compute of half of the gain; its ratio too is at that A. A dash: A is further than"
        f" {FLOOR:g} from that of {first_name}, or B is not known."
    )
    return [*tables, Table(title="Arm", head=head, rows=efficiency, note=note)]


def describe_study(study: Ablation) -> dict[str, Any]:
    """Return a study as a JSON object."""
    return {
        "common_compute": study.common,
        "shared_A": study.shared_A,
        "tail": study.tail,
        "seed_spread": {name: asdict(interval) for name, interval in study.spread.items()},
        "arms": [_describe_arm(arm) for arm in study.arms],
    }


def _describe_arm(arm: Arm) -> dict[str, Any]:
    intervals = ("A", "B", "C_mid", "B_shared", "C_mid_ratio", "A_less", "reached")
    runs = [
        {
            "seed": seed,
            "standing": assessment.standing,
            "C_max_over_C_mid": assessment.ratio if assessment.standing in REPORTED else None,
            "flags": assessment.flags,
        }
        for seed, assessment in zip(arm.seeds, arm.assessments, strict=True)
    ]
    return {
        "arm": arm.name,
        "seeds": arm.seeds,
        "standing": arm.standing,
        "reason": arm.reason,
        **{name: _as_dict(getattr(arm, name)) for name in intervals},
        "reached_at": arm.reached_at,
        "lower": dict(arm.lower),
        "verdict": format_verdict(arm),
        "runs": runs,
    }


# ---- costs of runs


def answer_ledgers(runs: Sequence[RunFolder], price: float = 0.0) -> Answer:
    """Answer with the sums of the ledgers of runs, with ``price`` for a device-hour of sessions that have no
    price. Raises ValueError for a run whose ledger is missing, empty or damaged."""
    folders = [run.path.resolve().name for run in runs]
    names = [
        name if folders.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(folders, start=1)
    ]
    costs_of, lead = {}, list[str]()
    for name, run in zip(names, runs, strict=True):
        rows = set_price(read(run), price)
        if not rows:
            raise ValueError(f"run {name} has no row in ledger.jsonl; it has finished no step yet")
        costs = costs_of[name] = summary(rows)
        start_count = {1: "once", 2: "twice"}.get(costs.sessions, f"{costs.sessions} times")
        lead += [
            f"{name}: {costs.steps} steps, started {start_count}.",
            *[TORN] * is_torn(run),
            *costs.notes,
        ]
    result = {"runs": [{"run": name, **asdict(costs)} for name, costs in costs_of.items()]}
    return Answer(result=result, lead=lead, tables=cost_tables(costs_of))
