"""Leave-one-out: which choices of a recipe move its ceiling, which only its efficiency (arXiv 2510.13786, 4).

An arm is the recipe with one choice changed, run with one or more seeds. For each of x = A, ln B, ln C_mid

    x of seed s = m + tau z[s],   z[s] ~ N(0, 1)         m: of the arm, the expected x of a new seed
    uncertainty of x of seed s: the posterior of its run

tau is how far runs differ by their seed alone. All ranked arms share it, because two seeds of one arm say
next to nothing about it, and two seeds of nine arms do. Its posterior is a grid (restricted likelihood, as in
random-effects meta-analysis), flat in tau (Gelman 2006). Where the runs have fewer than 3 degrees of freedom
over seeds, three runs of the paper are added: their ceilings lay within 0.015 of each other, and the paper
takes 0.02 as the margin (section 2.2). Draws of m are the mean of one draw of each seed plus tau z /
sqrt(seeds): variance within and between seeds is in every interval.

Arms of a seed share prompts and noise, which partly cancel in a difference. This is not used, so intervals of
differences are too wide rather than too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from ostinato.apps.scaling.curve import CONSERVATIVE, Noise, sd_of_mean
from ostinato.apps.scaling.gates import REPORTED, Assessment, Standing, assess
from ostinato.apps.scaling.posterior import Interval, Posterior, interval, posterior
from ostinato.apps.scaling.series import Series, require_comparable

FLOOR = 0.02  # the paper's margin: half of a 90 % interval of a run's A
Z90 = NormalDist().inv_cdf(0.95)
ENOUGH = 3  # degrees of freedom over seeds from which on the paper's runs are not added
PAPER = 2  # degrees of freedom of the paper's three runs
REFERENCE = "the recipe"
FAMILY = 0.10  # chance that any verdict says that A moves where it does not; as much again for B or C_mid
LAST = 0.8  # the score reached at C is the mean of the evaluations beyond this share of C
DRAWS = 8192

# Prior standard deviation between seeds: for A that of three runs of the paper (section 2.2); for ln B and
# ln C_mid nothing is published, the values are ours.
SPREAD = {"A": FLOOR / Z90, "B": 0.1, "C_mid": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run of an arm with one seed."""

    arm: str
    seed: int
    series: Series
    ended: bool = True  # False: it is going on, or was given up


class Verdict(StrEnum):
    REFERENCE = "-"
    MOVES_A = "moves A"
    MOVES_EFFICIENCY = "moves only"  # followed by what it moves: B, C_mid
    NONE = "no difference seen"
    HALF_NONE = "no difference in A seen; B not known"  # saturated from the first evaluation on
    UNSETTLED = "A not settled"  # A differs by more than the margin, but not beyond noise: B has no common A
    NOT_RANKED = "not ranked"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arm:
    """Estimates of one arm. Intervals are 90 %; None where the curve is not identified."""

    name: str
    seeds: tuple[int, ...]
    posteriors: tuple[Posterior, ...]  # of each seed
    assessments: tuple[Assessment, ...]
    standing: Standing  # the worst of its seeds
    reason: str  # why it is not ranked; empty where it is ranked
    reached: Interval | None = None  # score around ``reached_at``, as measured
    reached_at: float = 0.0  # the common compute, or less where a run of the arm did not get there
    A: Interval | None = None
    B: Interval | None = None
    C_mid: Interval | None = None
    B_shared: Interval | None = None  # at the A of the recipe; None where their A are too far apart
    C_mid_ratio: Interval | None = None  # over that of the recipe, both at the recipe's A
    A_less: Interval | None = None  # A of the arm less A of the recipe
    # P(lower than the recipe's); B, C_mid at shared A
    lower: Mapping[str, float] = field(default_factory=dict)
    moves: tuple[str, ...] = ()  # "A"; or of "B" and "C_mid"
    verdict: Verdict = Verdict.NOT_RANKED

    @property
    def ranked(self) -> bool:
        return self.standing in REPORTED

    @property
    def steep(self) -> bool:
        """Whether B and C_mid are identified for all seeds."""
        return self.ranked and all(assessment.steep for assessment in self.assessments)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ablation:
    """The compared arms, in the order in which they were given, the recipe first."""

    arms: tuple[Arm, ...]
    common: float  # compute that all ended runs of the ranked arms have reached
    shared_A: float | None  # mean A of the recipe; None where its curve is not identified
    tail: float  # a probability below it, or above 1 - tail, is a verdict on A; half of it on B and C_mid
    spread: Mapping[str, Interval]  # tau of A, ln B, ln C_mid


Draws = Mapping[str, np.ndarray]  # name of a parameter -> [N]


def ablate(
    runs: Sequence[Run],
    *,
    reference: str = REFERENCE,
    noise: Noise = CONSERVATIVE,
    draws: int = DRAWS,
    seed: int = 0,
) -> Ablation:
    """Compare every arm with ``reference``.

    Raises ValueError for runs of different axes or held-out sets, for two runs of an arm with the same seed,
    for a run with fewer than 3 evaluations, and without a run of ``reference``.
    """
    names = list(dict.fromkeys([reference, *(run.arm for run in runs)]))
    _check_runs(runs, reference)
    posteriors = [
        posterior(run.series, noise=noise, draws=draws, seed=seed + index) for index, run in enumerate(runs)
    ]
    by_arm = {
        name: [
            (run, run_posterior)
            for run, run_posterior in zip(runs, posteriors, strict=True)
            if run.arm == name
        ]
        for name in names
    }
    rng = np.random.default_rng(seed)
    arms = [_summarise_arm(name, pairs) for name, pairs in by_arm.items()]
    common = _find_common_compute(runs, {arm.name for arm in arms if arm.ranked})
    arms = _score_at(arms, common, rng, draws)
    ranked_arms = [arm for arm in arms if arm.ranked]
    tau = draw_spreads(
        [[_take_logs(run_posterior) for run_posterior in arm.posteriors] for arm in ranked_arms], rng, draws
    )
    draws_of = {
        arm.name: pool_seeds([_take_logs(run_posterior) for run_posterior in arm.posteriors], tau, rng)
        for arm in ranked_arms
    }
    shared_A = float(np.mean(draws_of[reference]["A"])) if reference in draws_of else None
    tail = FAMILY / (2 * max(1, len(names) - 1))
    draws_at_ceiling = {} if shared_A is None else _draw_at_ceiling(ranked_arms, draws_of, shared_A, rng)
    return Ablation(
        arms=tuple(_compare_arm(arm, draws_of, draws_at_ceiling, reference, tail) for arm in arms),
        common=common,
        shared_A=shared_A,
        tail=tail,
        spread={name: interval(tau_draws) for name, tau_draws in tau.items()},
    )


def _check_runs(runs: Sequence[Run], reference: str) -> None:
    """Raise ValueError for runs that cannot be compared."""
    if not any(run.arm == reference for run in runs):
        raise ValueError(f"no run of {reference!r} is there to compare the arms with; let it run first")
    keys = [(run.arm, run.seed) for run in runs]
    for arm, seed in keys:
        if keys.count((arm, seed)) > 1:
            raise ValueError(f"arm {arm!r} has seed {seed} more than once; keep one of these runs")
    require_comparable(*(run.series for run in runs))


def _summarise_arm(name: str, pairs: Sequence[tuple[Run, Posterior]]) -> Arm:
    """Summarise the runs of an arm, before it is compared."""
    assessments = [assess(run_posterior) for _, run_posterior in pairs]
    seeds = [run.seed for run, _ in pairs]
    order = list(Standing)
    worst_standing = max((assessment.standing for assessment in assessments), key=order.index)
    reasons = [
        f"seed {seed}: {assessment.reason}"
        for seed, assessment in zip(seeds, assessments, strict=True)
        if assessment.standing is Standing.NOT_IDENTIFIED
    ]
    return Arm(
        name=name,
        seeds=tuple(seeds),
        posteriors=tuple(run_posterior for _, run_posterior in pairs),
        assessments=tuple(assessments),
        standing=worst_standing,
        reason="; ".join(reasons),
    )


def _find_common_compute(runs: Sequence[Run], ranked_names: Set[str]) -> float:
    """Return the compute at which scores are compared: what all ended runs of ranked arms have reached.
    Without such runs, all ended runs count, and without these all runs. So a run that died early, or is going
    on, does not lower it for the others."""
    ended_runs = [run for run in runs if run.ended]
    candidates = [run for run in ended_runs if run.arm in ranked_names] or ended_runs or runs
    return min(float(run.series.compute[-1]) for run in candidates)


def _score_at(arms: Sequence[Arm], common: float, rng: np.random.Generator, draws: int) -> list[Arm]:
    """Return the arms with their scores around compute ``common``, as measured. No curve is used, so a run
    that collapsed has a score too. An arm that did not reach ``common`` has the score at the end of its
    shortest run. Ranked arms share one spread between seeds; each other arm has its own."""
    ends = [
        min(common, *(float(run_posterior.series.compute[-1]) for run_posterior in arm.posteriors))
        for arm in arms
    ]
    measurements = [_measure_scores(arm.posteriors, end) for arm, end in zip(arms, ends, strict=True)]
    scale, scored_arms = SPREAD["A"], []
    shared_tau = draw_spread(
        [measurement for arm, measurement in zip(arms, measurements, strict=True) if arm.ranked],
        scale,
        rng,
        draws,
    )
    for arm, end, (means, errors) in zip(arms, ends, measurements, strict=True):
        tau = shared_tau if arm.ranked else draw_spread([(means, errors)], scale, rng, draws)
        sd = np.sqrt((errors**2).sum() / len(means) ** 2 + tau**2 / len(means))
        score = np.clip(means.mean() + sd * rng.standard_normal(draws), 0, 1)
        scored_arms.append(replace(arm, reached=interval(score), reached_at=end))
    return scored_arms


def _measure_scores(posteriors: Sequence[Posterior], end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ([s] means, [s] standard errors) of the last evaluations of each seed up to compute ``end``."""
    means, errors = [], []
    for run_posterior in posteriors:
        series = run_posterior.series
        is_near = (LAST * end <= series.compute) & (series.compute <= end)
        if not is_near.any():  # then the last evaluation before ``end``, or the first
            is_near[max(0, int(np.searchsorted(series.compute, end, side="right")) - 1)] = True
        means.append(float(series.score[is_near].mean()))
        errors.append(
            sd_of_mean(
                int(is_near.sum()), float(np.median(run_posterior.sd[is_near])), run_posterior.noise.rho
            )
        )
    return np.array(means), np.array(errors)


# -- variance between and within seeds


def draw_spreads(
    groups: Sequence[Sequence[Draws]], rng: np.random.Generator, n: int
) -> dict[str, np.ndarray]:
    """Draw tau of every parameter by ``draw_spread``, from the draws of each run of each arm."""
    return {
        name: draw_spread(
            [
                (np.array([run[name].mean() for run in arm]), np.array([run[name].std() for run in arm]))
                for arm in groups
            ],
            scale,
            rng,
            n,
        )
        for name, scale in SPREAD.items()
    }


def pool_seeds(seeds: Sequence[Draws], tau: Draws, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return draws of m of every parameter: the mean over the independent seeds, plus its error by tau."""
    root = math.sqrt(len(seeds))
    return {
        name: np.mean([run[name] for run in seeds], axis=0)
        + tau[name] * rng.standard_normal(len(tau[name])) / root
        for name in SPREAD
    }


def _take_logs(run_posterior: Posterior) -> Draws:
    return {"A": run_posterior.A, "B": np.log(run_posterior.B), "C_mid": np.log(run_posterior.C_mid)}


def condition_on_ceiling(posterior: Posterior, A: float) -> dict[str, np.ndarray]:
    """Return draws of ln B and ln C_mid given the ceiling ``A``, since slopes compare at an equal ceiling
    only (appendix A.6). They are regressed on A among the draws, which is exact for a normal posterior and
    close for an identified curve. Errors of the measured R0 remain."""
    own_draws, deviation = _take_logs(posterior), posterior.A - posterior.A.mean()
    variance = float(deviation @ deviation)
    conditional_draws = {"A": np.full_like(posterior.A, A)}
    for name in ("B", "C_mid"):
        slope = float(deviation @ own_draws[name]) / variance if variance else 0.0
        conditional_draws[name] = own_draws[name] - slope * (posterior.A - A)
    return conditional_draws


# -- comparison with the recipe


def _draw_at_ceiling(
    ranked_arms: Sequence[Arm], draws_of: Mapping[str, Draws], A: float, rng: np.random.Generator
) -> dict[str, Draws]:
    """Return draws of ln B and ln C_mid at the ceiling ``A``, by arm. An arm is left out if its B is not
    identified, or if its own ceiling is not within the margin of ``A``, since its curve would then be another
    one."""
    near_arms = [
        arm
        for arm in ranked_arms
        if arm.steep and abs(float(np.median(draws_of[arm.name]["A"])) - A) <= FLOOR
    ]
    seeds_of = {
        arm.name: [condition_on_ceiling(run_posterior, A) for run_posterior in arm.posteriors]
        for arm in near_arms
    }
    tau = draw_spreads(list(seeds_of.values()), rng, len(ranked_arms[0].posteriors[0].A))
    return {name: pool_seeds(seeds, tau, rng) for name, seeds in seeds_of.items()}


def _compare_arm(
    arm: Arm,
    draws_of: Mapping[str, Draws],
    draws_at_ceiling: Mapping[str, Draws],
    reference: str,
    tail: float,
) -> Arm:
    """Return ``arm`` with its intervals and its verdict beside the recipe. An arm that is not ranked is
    returned as it is, and without a ranked recipe an arm has its own intervals alone."""
    if not arm.ranked:
        return arm
    arm_draws = draws_of[arm.name]
    arm = replace(
        arm,
        A=interval(np.clip(arm_draws["A"], 0, 1)),
        B=interval(np.exp(arm_draws["B"])) if arm.steep else None,
        C_mid=interval(np.exp(arm_draws["C_mid"])) if arm.steep else None,
    )
    if reference not in draws_of:
        return replace(arm, reason=f"{reference} is not identified")
    at_shared, reference_at_shared = draws_at_ceiling.get(arm.name), draws_at_ceiling.get(reference)
    if at_shared is not None:
        arm = replace(arm, B_shared=interval(np.exp(at_shared["B"])))
    if arm.name == reference:
        return replace(arm, verdict=Verdict.REFERENCE)
    differences = arm_draws["A"] - draws_of[reference]["A"]
    lower = {"A": float(np.mean(differences < 0))}
    if at_shared is not None and reference_at_shared is not None:
        lower |= {
            name: float(np.mean(at_shared[name] < reference_at_shared[name])) for name in ("B", "C_mid")
        }
        arm = replace(arm, C_mid_ratio=interval(np.exp(at_shared["C_mid"] - reference_at_shared["C_mid"])))
    verdict, moves = decide_verdict(lower, float(np.median(differences)), tail)
    return replace(arm, A_less=interval(differences), lower=lower, verdict=verdict, moves=moves)


def decide_verdict(lower: Mapping[str, float], apart: float, tail: float) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and the parameters that an arm moves.

    A is moved if the probability that it is lower is beyond ``tail`` on either side. If it is not, and the
    medians are no further ``apart`` than the margin (0.02), B and C_mid are tested at one A, each with half
    of the tail, since these are two tests. If ``lower`` has no B and C_mid, the verdict is about A alone.
    """

    def is_beyond(name: str, tail: float) -> bool:
        return not tail <= lower[name] <= 1 - tail

    if is_beyond("A", tail):
        return Verdict.MOVES_A, ("A",)
    if abs(apart) > FLOOR:
        return Verdict.UNSETTLED, ()
    if "B" not in lower:
        return Verdict.HALF_NONE, ()
    moves = tuple(name for name in ("B", "C_mid") if is_beyond(name, tail / 2))
    return (Verdict.MOVES_EFFICIENCY, moves) if moves else (Verdict.NONE, ())


def draw_spread(
    groups: Sequence[tuple[np.ndarray, np.ndarray]], scale: float, rng: np.random.Generator, n: int
) -> np.ndarray:
    """Draw [n] values of tau, the standard deviation between runs of a group.

    ``groups`` are ([s] means, [s] standard errors) of the runs of each group, whose own mean is free (flat).
    If they have fewer than ``ENOUGH`` degrees of freedom, the prior counts as two more, around ``scale``.
    """
    tau = np.geomspace(scale / 30, scale * 30, 400)
    log_p = np.log(tau)  # flat in tau, on a grid of ln tau
    if sum(len(means) - 1 for means, _ in groups) < ENOUGH:
        log_p = -PAPER * (np.log(tau) + scale**2 / (2 * tau**2))  # a scaled inverse chi-squared of tau^2
    for means, errors in groups:
        weight = 1 / (tau[:, None] ** 2 + errors**2)
        centre = (weight @ means) / weight.sum(1)
        deviation = means - centre[:, None]
        log_p += 0.5 * (np.log(weight).sum(1) - np.log(weight.sum(1)) - (weight * deviation**2).sum(1))
    mass = np.cumsum(np.exp(log_p - log_p.max()))
    return np.interp(rng.random(n) * mass[-1], mass, tau)
