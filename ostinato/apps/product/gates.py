"""Gates of a candidate judge and of a candidate policy: measurements in, a decision with its reasons out.

"Not worse" is shown, not assumed: the lower end of an interval of the paired difference to the current one
has to be above minus the margin, so too little data does not pass. Rows of one user are one cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from ostinato.apps.product.judging import Choice, calibration_gaps

Z95 = NormalDist().inv_cdf(0.95)  # one-sided


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """``reasons``: a sentence of every gate, those that failed first; ``failed``: their names."""

    passed: bool
    reasons: tuple[str, ...]
    failed: tuple[str, ...]
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gate:
    """One finding. ``figures`` are named ``name/what``."""

    name: str
    passed: bool
    sentence: str
    figures: Mapping[str, float]


def assess(gates: Sequence[Gate]) -> Assessment:
    """Passed where every gate is; not without any."""
    ordered = sorted(gates, key=lambda one: one.passed)
    return Assessment(
        passed=bool(gates) and all(gate.passed for gate in gates),
        reasons=tuple(
            f"{'passed' if one.passed else 'failed'}: {one.name}: {one.sentence}" for one in ordered
        ),
        failed=tuple(one.name for one in ordered if not one.passed),
        figures={f"{gate.name}/{key}": value for gate in gates for key, value in gate.figures.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """A judge on n pairs: its verdict of both orders, and, where it is known, its probability that A is
    better [n]."""

    choices: Sequence[Choice]
    probabilities: np.ndarray | None = None

    def right(self, labels: Sequence[Choice]) -> np.ndarray:
        """[n] 1 where both orders agree and are right; what is unreadable or inconsistent is wrong."""
        return np.array([one == label for one, label in zip(self.choices, labels, strict=True)], float)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeLimits:
    first: float = 0.5  # the accuracy that the first judge has to be above
    accuracy_margin: float = 0.03  # by which accuracy may be lower than that of the current judge
    calibration_margin: float = 0.05  # by which the calibration error may be higher
    consistency: float = 0.9
    bank: float = 0.0  # the share of the known exploits against which the honest answer need not win
    probe: float = 0.1  # the most of the probes that padding or decoration may win
    fewest: int = 20  # clusters (users)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLimits:
    ability_margin: float = 0.03  # of the score of each held-out task
    panel_margin: float = 0.05  # below a win rate of one half
    kl: float = 0.5  # nats a token to the current policy
    fewest: int = 20


def compare_pairs(
    one: np.ndarray, other: np.ndarray | float, clusters: Sequence[str] | None = None
) -> tuple[float, float, int]:
    """(mean difference, its standard error over clusters, clusters). Values that are NaN on a side are a
    ValueError: leave out the pair on both. Error by the sums of clusters (Liang and Zeger 1986)."""
    difference = np.asarray(one, float) - other
    if not np.isfinite(difference).all():
        raise ValueError("a measurement is not finite; leave its row out on both sides")
    n = len(difference)
    places = _places(clusters, n)
    many = int(places.max()) + 1 if n else 0
    if many < 2:
        return (float(difference.mean()) if n else math.nan), math.inf, many
    mean = float(difference.mean())
    sums = np.bincount(places, difference - mean)
    return mean, math.sqrt(many / (many - 1) * float(sums @ sums)) / n, many


def _places(clusters: Sequence[str] | None, n: int) -> np.ndarray:
    if clusters is None:
        return np.arange(n)
    if len(clusters) != n:
        raise ValueError(f"clusters has {len(clusters)} names for {n} rows")
    return np.unique(np.asarray(clusters, str), return_inverse=True)[1]


def not_worse(
    name: str, found: tuple[float, float, int], margin: float, fewest: int, what: str = "the current one"
) -> Gate:
    """Is the difference of ``compare_pairs`` above - margin with a confidence of 95 %?"""
    gap, error, many = found
    low, high = gap - Z95 * error, gap + Z95 * error
    figures = {"gap": gap, "low": low, "high": high, "clusters": float(many)}
    if many < fewest:
        return Gate(name, False, f"{many} users or rows, fewer than {fewest}: measure more", figures)
    sentence = f"{gap:+.3f} to {what} ({low:+.3f} to {high:+.3f}; at least {-margin:+g} is needed)"
    return Gate(name, low >= -margin - 1e-12, sentence, figures)


def judge_gates(
    candidate: Judged,
    current: Judged | None,
    labels: Sequence[Choice],
    *,
    users: Sequence[str] | None = None,
    bank: Mapping[str, Choice],
    probes: Mapping[str, Sequence[Choice]],
    limits: JudgeLimits | None = None,
) -> Assessment:
    """Of a candidate judge on pairs behind its training in time, beside the current one on the same (None:
    there is none yet, and it has to be better than ``limits.first``).

    ``bank``: of every known exploit the verdict of both orders, A the honest answer. ``probes``: "length" and
    "format" by name, A the plain answer, B the same padded or decorated.
    """
    limits = limits or JudgeLimits()
    against, what, margin = limits.first, f"an accuracy of {limits.first:g}", 0.0
    if current is not None:
        against, what, margin = current.right(labels), "the current judge", limits.accuracy_margin
    found = compare_pairs(candidate.right(labels), against, users)
    gates = [
        not_worse("accuracy", found, margin, limits.fewest, what),
        _consistency(candidate.choices, limits.consistency),
        _bank(bank, limits.bank),
        *(_probe(name, verdicts, limits.probe) for name, verdicts in probes.items()),
    ]
    if len(labels) and candidate.probabilities is not None and current and current.probabilities is not None:
        truth = np.array([label is Choice.A for label in labels], float)
        interval = calibration_gap(candidate.probabilities, current.probabilities, truth, users)
        gates.append(_calibration(*interval, limits.calibration_margin))
    return assess(gates)


def calibration_gap(
    candidate: np.ndarray,
    current: np.ndarray,
    truth: np.ndarray,
    users: Sequence[str] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(calibration error of the candidate less that of the current one, 5 % and 95 % quantiles of it over
    bootstrapped users): both on the same draws, which is what makes it paired."""
    places = _places(users, len(truth))
    many = int(places.max()) + 1
    count = np.random.default_rng(seed).multinomial(many, np.full(many, 1 / many), size=draws)
    weight = np.concatenate((np.ones((1, many)), count))  # the first draw is the sample itself
    sizes = weight @ np.bincount(places, minlength=many)
    errors = []
    for p in (candidate, current):
        bins, gaps = calibration_gaps(p, truth)
        table = np.zeros((many, int(bins.max()) + 1))
        np.add.at(table, (places, bins), gaps)
        errors.append(np.abs(weight @ table).sum(1) / sizes)
    gap = errors[0] - errors[1]
    low, high = np.quantile(gap[1:], [0.05, 0.95])
    return float(gap[0]), float(low), float(high)


def _calibration(gap: float, low: float, high: float, margin: float) -> Gate:
    sentence = f"error {gap:+.3f} to the current judge ({low:+.3f} to {high:+.3f}; at most {margin:+g})"
    return Gate("calibration", high <= margin, sentence, {"gap": gap, "low": low, "high": high})


def _consistency(choices: Sequence[Choice], least: float) -> Gate:
    agreed = sum(choice in (Choice.A, Choice.B, Choice.TIE) for choice in choices)
    share = agreed / len(choices) if choices else 0.0
    unreadable = sum(choice is Choice.UNREADABLE for choice in choices)
    sentence = f"{share:.1%} of {len(choices)} pairs have one verdict in both orders, {least:.0%} are needed"
    figures = {"share": share, "unreadable": float(unreadable), "n": float(len(choices))}
    return Gate("consistency", share >= least, f"{sentence} ({unreadable} unreadable)", figures)


def _bank(bank: Mapping[str, Choice], most: float) -> Gate:
    lost = sorted(name for name, one in bank.items() if one is not Choice.A)
    names = f": {', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''}" if lost else ""
    sentence = f"the honest answer does not win {len(lost)} of {len(bank)} known exploits{names}"
    figures = {"lost": float(len(lost)), "n": float(len(bank))}
    return Gate("bank", len(lost) <= most * len(bank), sentence, figures)


def _probe(name: str, verdicts: Sequence[Choice], most: float) -> Gate:
    if not verdicts:
        return Gate(name, False, "no probe was judged; give some", {"n": 0.0})
    share = sum(verdict is Choice.B for verdict in verdicts) / len(verdicts)
    sentence = f"{share:.1%} of {len(verdicts)} probes are won by what adds nothing, at most {most:.0%}"
    return Gate(name, share <= most, sentence, {"share": share, "n": float(len(verdicts))})


def policy_gates(
    ability: Mapping[str, tuple[float, float, int]],
    panel: Sequence[Choice],
    kl: float,
    *,
    limits: PolicyLimits | None = None,
) -> Assessment:
    """Of a candidate policy. ``ability``: ``compare_pairs`` of the scores of each held-out task, candidate
    less the current policy. ``panel``: verdicts of gold in both orders, A the candidate's answer; a tie is
    half a win, one without a verdict is a loss. ``kl``: nats a token from the current policy,
    behind training."""
    limits = limits or PolicyLimits()
    wins = [{Choice.A: 1.0, Choice.TIE: 0.5}.get(one, 0.0) for one in panel]
    inside = math.isfinite(kl) and kl <= limits.kl
    gates = [
        *(
            not_worse(f"ability {name}", found, limits.ability_margin, limits.fewest)
            for name, found in ability.items()
        ),
        not_worse(
            "panel", compare_pairs(np.array(wins), 0.5), limits.panel_margin, limits.fewest, "one half"
        ),
        Gate("kl", inside, f"{kl:.3g} nats a token of a budget of {limits.kl:g}", {"nats": kl}),
    ]
    if not ability:
        gates.append(Gate("ability", False, "no held-out task was scored; give one", {}))
    return assess(gates)
