"""Gates of a candidate judge and of a candidate policy: measurements in, a decision with its reasons out.

"Not worse" has to be shown: the lower end of an interval of the paired difference to the current one has to
be above minus the margin. So too little data does not pass. Rows of one user are one cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from ostinato.apps.product.judging import Choice, compute_calibration_gaps

Z95 = NormalDist().inv_cdf(0.95)  # one-sided


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The decision of all gates. ``reasons`` has a sentence of every gate, failed gates first. ``failed`` has
    the names of the failed gates."""

    passed: bool
    reasons: tuple[str, ...]
    failed: tuple[str, ...]
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gate:
    """The result of one gate: its name, whether it passed, the reason, and its figures by name."""

    name: str
    passed: bool
    sentence: str
    figures: Mapping[str, float]


def assess_gates(gates: Sequence[Gate]) -> Assessment:
    """Return the assessment of all gates: passed where every gate passed, and failed where there is none."""
    sorted_gates = sorted(gates, key=lambda gate: gate.passed)
    return Assessment(
        passed=bool(gates) and all(gate.passed for gate in gates),
        reasons=tuple(
            f"{'passed' if gate.passed else 'failed'}: {gate.name}: {gate.sentence}" for gate in sorted_gates
        ),
        failed=tuple(gate.name for gate in sorted_gates if not gate.passed),
        figures={f"{gate.name}/{key}": value for gate in gates for key, value in gate.figures.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """Verdicts of a judge on n pairs, each of both orders, and, where they are known, its probabilities [n]
    that A is better."""

    choices: Sequence[Choice]
    probabilities: np.ndarray | None = None

    def right(self, labels: Sequence[Choice]) -> np.ndarray:
        """Return [n] 1 if both orders agree and are right, else 0. Unreadable and inconsistent verdicts are
        wrong."""
        return np.array([choice == label for choice, label in zip(self.choices, labels, strict=True)], float)


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
    """Return (mean difference ``one`` - ``other``, its standard error over clusters, number of clusters).

    The error is by the sums of clusters (Liang and Zeger 1986); it is infinite for fewer than two, and the
    mean of no row is NaN. Raises ValueError for another number of ``clusters`` than of rows, and for a value
    that is NaN or infinite: leave out the pair on both sides.
    """
    difference = np.asarray(one, float) - other
    if not np.isfinite(difference).all():
        raise ValueError("a measurement is not finite; leave its row out on both sides")
    n = len(difference)
    indices = _index_clusters(clusters, n)
    cluster_count = int(indices.max()) + 1 if n else 0
    if cluster_count < 2:
        return (float(difference.mean()) if n else math.nan), math.inf, cluster_count
    mean = float(difference.mean())
    sums = np.bincount(indices, difference - mean)
    return mean, math.sqrt(cluster_count / (cluster_count - 1) * float(sums @ sums)) / n, cluster_count


def _index_clusters(clusters: Sequence[str] | None, n: int) -> np.ndarray:
    if clusters is None:
        return np.arange(n)
    if len(clusters) != n:
        raise ValueError(f"clusters has {len(clusters)} names for {n} rows")
    return np.unique(np.asarray(clusters, str), return_inverse=True)[1]


def check_not_worse(
    name: str,
    difference: tuple[float, float, int],
    margin: float,
    fewest: int,
    reference_name: str = "the current one",
) -> Gate:
    """Make a gate that passes if the difference of ``compare_pairs`` is above -margin with a confidence of
    95 %. It fails with fewer than ``fewest`` clusters."""
    gap, error, cluster_count = difference
    low, high = gap - Z95 * error, gap + Z95 * error
    figures = {"gap": gap, "low": low, "high": high, "clusters": float(cluster_count)}
    if cluster_count < fewest:
        return Gate(name, False, f"{cluster_count} users or rows, fewer than {fewest}: measure more", figures)
    sentence = f"{gap:+.3f} to {reference_name} ({low:+.3f} to {high:+.3f}; at least {-margin:+g} is needed)"
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
    """Assess a candidate judge on pairs that are later than its training data, beside the current judge on
    the same pairs. Without a current judge (None) the candidate has to be better than ``limits.first``.

    ``bank`` has the verdict of both orders on every known exploit; A is the honest answer. ``probes`` has
    such verdicts by name ("length", "format"); A is the plain answer, B the same padded or decorated.
    Calibration is assessed only if both judges have probabilities. Raises ValueError as ``compare_pairs``.
    """
    limits = limits or JudgeLimits()
    reference, reference_name, margin = limits.first, f"an accuracy of {limits.first:g}", 0.0
    if current is not None:
        reference, reference_name, margin = current.right(labels), "the current judge", limits.accuracy_margin
    difference = compare_pairs(candidate.right(labels), reference, users)
    gates = [
        check_not_worse("accuracy", difference, margin, limits.fewest, reference_name),
        _check_consistency(candidate.choices, limits.consistency),
        _check_bank(bank, limits.bank),
        *(_check_probe(name, verdicts, limits.probe) for name, verdicts in probes.items()),
    ]
    if len(labels) and candidate.probabilities is not None and current and current.probabilities is not None:
        truth = np.array([label is Choice.A for label in labels], float)
        interval = compute_calibration_gap(candidate.probabilities, current.probabilities, truth, users)
        gates.append(_check_calibration(*interval, limits.calibration_margin))
    return assess_gates(gates)


def compute_calibration_gap(
    candidate: np.ndarray,
    current: np.ndarray,
    truth: np.ndarray,
    users: Sequence[str] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Return (calibration error of the candidate less that of the current judge, its 5 % and 95 % quantiles
    over bootstrapped users). Both errors are on the same draws, so the comparison is paired."""
    indices = _index_clusters(users, len(truth))
    cluster_count = int(indices.max()) + 1
    counts = np.random.default_rng(seed).multinomial(
        cluster_count, np.full(cluster_count, 1 / cluster_count), size=draws
    )
    weight = np.concatenate((np.ones((1, cluster_count)), counts))  # the first draw is the sample itself
    sizes = weight @ np.bincount(indices, minlength=cluster_count)
    errors = []
    for p in (candidate, current):
        bins, gaps = compute_calibration_gaps(p, truth)
        table = np.zeros((cluster_count, int(bins.max()) + 1))
        np.add.at(table, (indices, bins), gaps)
        errors.append(np.abs(weight @ table).sum(1) / sizes)
    gap = errors[0] - errors[1]
    low, high = np.quantile(gap[1:], [0.05, 0.95])
    return float(gap[0]), float(low), float(high)


def _check_calibration(gap: float, low: float, high: float, margin: float) -> Gate:
    sentence = f"error {gap:+.3f} to the current judge ({low:+.3f} to {high:+.3f}; at most {margin:+g})"
    return Gate("calibration", high <= margin, sentence, {"gap": gap, "low": low, "high": high})


def _check_consistency(choices: Sequence[Choice], min_share: float) -> Gate:
    agreements = sum(choice in (Choice.A, Choice.B, Choice.TIE) for choice in choices)
    share = agreements / len(choices) if choices else 0.0
    unreadable = sum(choice is Choice.UNREADABLE for choice in choices)
    sentence = (
        f"{share:.1%} of {len(choices)} pairs have one verdict in both orders, {min_share:.0%} are needed"
    )
    figures = {"share": share, "unreadable": float(unreadable), "n": float(len(choices))}
    return Gate("consistency", share >= min_share, f"{sentence} ({unreadable} unreadable)", figures)


def _check_bank(bank: Mapping[str, Choice], max_share: float) -> Gate:
    losses = sorted(name for name, choice in bank.items() if choice is not Choice.A)
    names = f": {', '.join(losses[:3])}{' ...' if len(losses) > 3 else ''}" if losses else ""
    sentence = f"the honest answer does not win {len(losses)} of {len(bank)} known exploits{names}"
    figures = {"lost": float(len(losses)), "n": float(len(bank))}
    return Gate("bank", len(losses) <= max_share * len(bank), sentence, figures)


def _check_probe(name: str, verdicts: Sequence[Choice], max_share: float) -> Gate:
    if not verdicts:
        return Gate(name, False, "no probe was judged; give some", {"n": 0.0})
    share = sum(verdict is Choice.B for verdict in verdicts) / len(verdicts)
    sentence = f"{share:.1%} of {len(verdicts)} probes are won by what adds nothing, at most {max_share:.0%}"
    return Gate(name, share <= max_share, sentence, {"share": share, "n": float(len(verdicts))})


def policy_gates(
    ability: Mapping[str, tuple[float, float, int]],
    panel: Sequence[Choice],
    kl: float,
    *,
    limits: PolicyLimits | None = None,
) -> Assessment:
    """Assess a candidate policy.

    ``ability``: ``compare_pairs`` of the scores of each held-out task, candidate less the current policy.
    ``panel``: verdicts of gold, A the candidate's answer; a tie is half a win, no verdict is a loss. ``kl``:
    nats per token from the current policy, at the end of training. Fails without a task in ``ability``.
    """
    limits = limits or PolicyLimits()
    wins = [{Choice.A: 1.0, Choice.TIE: 0.5}.get(choice, 0.0) for choice in panel]
    is_within_budget = math.isfinite(kl) and kl <= limits.kl
    gates = [
        *(
            check_not_worse(f"ability {name}", difference, limits.ability_margin, limits.fewest)
            for name, difference in ability.items()
        ),
        check_not_worse(
            "panel", compare_pairs(np.array(wins), 0.5), limits.panel_margin, limits.fewest, "one half"
        ),
        Gate("kl", is_within_budget, f"{kl:.3g} nats a token of a budget of {limits.kl:g}", {"nats": kl}),
    ]
    if not ability:
        gates.append(Gate("ability", False, "no held-out task was scored; give one", {}))
    return assess_gates(gates)
