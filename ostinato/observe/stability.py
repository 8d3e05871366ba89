"""The stability watch: detects that a run has stopped learning and begun to diverge.

Mixtures of experts rarely break in one step. Sampler and trainer drift apart, the gradient comes from tokens
that the sampler would not have drawn, and the reward follows some tens of steps later. ``Watch`` detects this
in columns that every run writes. The condition of a rule must hold for several steps in a row; a rule is
reported once, from past rows only: the alarms after n steps are those of the first n of a longer run.

Three rules count as a collapse, as in published studies of collapse: F(2), k3 and the reward. The others
(gradient norm, entropy, truncated answers) are only warnings, as a healthy run may show them.

No rule depends on the unit or the zero of a reward. F(2) and truncation are
held against published runs, everything else against the run itself.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from numbers import Real
from statistics import median
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Rule(StrEnum):
    TAIL = "tail"
    KL = "kl"
    REWARD = "reward"
    GRADIENT = "gradient"
    ENTROPY_LOW = "entropy_low"
    ENTROPY_HIGH = "entropy_high"
    TRUNCATED = "truncated"  # the warning
    TRUNCATED_MUCH = "truncated_much"  # the alarm
    TRUNCATED_EARLY = "truncated_early"  # from the start of the run
    FORGETTING = "forgetting"  # of ``pipeline.forgetting``, which has rows to look at


COLLAPSES = frozenset({Rule.TAIL, Rule.KL, Rule.REWARD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The threshold of each rule and its reason. ``*_steps``: consecutive steps for which it must hold."""

    # F(2), the share of tokens to which one side gives more than twice the probability of the other: 1e-5 to
    # 2e-3 in published healthy runs, above 0.1 just before GRPO collapsed (R3, arXiv 2510.11370).
    tail: float = 0.1
    tail_steps: int = 5
    # k3: a small model's F(2) can stay 0 while all else breaks, so the same on the run's own scale: 100 times
    # the median of its first 20 steps. Healthy mixtures are seen up to 0.01 nats a token or so, hence the
    # floor: 100 times next to nothing is still next to nothing.
    kl_times: float = 100.0
    kl_nats: float = 0.05
    kl_early: int = 20
    kl_steps: int = 5
    # The reward's moving mean has lost half of what it had gained since the start, and half of the deviation
    # between answers: that is the scale of a run which began high and gained little. 20 steps in a row, in
    # short runs too: fewer may be a hard stretch of prompts, and a run that ends before has
    # nothing left to stop. The fall must also exceed what noise explains, for the highest of many means lies
    # well above the truth. 40 simulated runs of 200 steps each, groups of 8 answers to prompts of unequal
    # difficulty: of those that stay level at 0.1, 0.5 or 0.9 none is called collapsed; at 0.005 and
    # 0.02, 3 to 9 with 8 or 32 answers a step, none with 256. A fall from 0.5 to 0.08 is found after 22 steps
    # with 64 answers a step, within 100 steps in 6 of 15 runs with 8; one from 0.5 to 0.45 never. Where no
    # reward was negative it must be below half of its highest, too: a run that gained a little and lost it
    # again is worse, not broken.
    reward_lost: float = 0.5
    reward_steps: int = 20
    reward_errors: float = 6.0
    # Gradient norm over the median of all norms before it: clipping hides it from the weights, not from Adam.
    gradient_times: float = 50.0
    gradient_before: int = 10
    gradient_steps: int = 3
    # Entropy: a task that is learned ends at a few percent of where it began (quickstart at 6), so a low one
    # counts only while the reward is not near its best. A high one must also have risen by half a nat, as a
    # multiple of next to nothing is next to nothing, and must still be rising.
    entropy_left: float = 0.05
    entropy_times: float = 3.0
    entropy_nats: float = 0.5
    entropy_steps: int = 5
    # Truncated answers: ScaleRL's runs destabilised at 10 to 15 % and did not recover, while healthy ones
    # stayed below 5 % (arXiv 2510.13786). A rise is reported. A policy that starts high, like a base model
    # that never learned to stop, may still improve: the start is reported, and if it is above the alarm,
    # only a further rise of 15 points raises the alarm.
    truncated_warning: float = 0.10
    truncated_alarm: float = 0.15
    truncated_rise: float = 0.15
    truncated_window: int = 10  # steps in the mean: long enough that one mean above the limit is enough
    truncated_steps: int = 1
    thriving: float = 0.8  # of the reward's highest gain: near its best
    window: int = 5  # steps in a moving mean
    least: int = 5  # values that a median needs


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that was met for the first time at ``step``; its condition has held since step ``since``."""

    step: int
    since: int
    rule: Rule
    collapse: bool
    sentence: str  # for people; names neither step

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Course:
    """Running statistics of a noisy column: the mean of its last ``window`` values (None until there are that
    many), the first, highest and lowest of these means, and the standard error of one.

    The error is estimated from the changes between steps (von Neumann 1941), so a trend hardly affects it.
    """

    window: int
    now: float | None = None
    start: float = 0.0
    best: float = -math.inf
    least: float = math.inf  # of the means
    lowest: float = math.inf  # of the values themselves
    _values: deque[float] = field(default_factory=deque)
    _means: deque[float] = field(default_factory=deque)
    _count: int = 0
    _squares: float = 0.0  # of the changes from step to step

    def add(self, value: float) -> None:
        if self._values:
            change = value - self._values[-1]
            self._squares += change * change  # ** would raise where this overflows to inf
        self._count += 1
        self.lowest = min(self.lowest, value)
        self._values.append(value)
        if len(self._values) > self.window:
            self._values.popleft()
        if len(self._values) == self.window:
            self.now = sum(self._values) / self.window
            self.start = self.now if self._count == self.window else self.start
            self.best = max(self.best, self.now)
            self.least = min(self.least, self.now)
            self._means.append(self.now)
            if len(self._means) > self.window + 1:
                self._means.popleft()

    @property
    def error(self) -> float:
        return math.sqrt(self._squares / max(1, self._count - 1) / 2 / self.window)

    @property
    def rising(self) -> bool:
        """Whether the mean is above the mean one window ago."""
        return len(self._means) > self.window and self._means[-1] > self._means[0]


class Sign(NamedTuple):
    """A rule applied to a row: whether its condition holds, and the report once it has held for ``steps``."""

    rule: Rule
    steps: int
    holds: bool
    sentence: str


class Watch:
    """Checks a run in progress, row by row: some tens of microseconds and a few numbers per step. Each rule
    is reported once; values that are missing or not finite raise nothing."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        window = self._limits.window
        self._reward, self._spread, self._entropy = Course(window), Course(window), Course(window)
        self._truncated = Course(self._limits.truncated_window)
        self._early: list[float] = []  # the first values of k3
        self._norms: list[float] = []  # all so far, sorted
        self._streaks: dict[Rule, list[int]] = {rule: [] for rule in Rule}  # the steps of its current streak
        self._reported: set[Rule] = set()

    @property
    def collapsed(self) -> bool:
        """Whether a collapse rule has been met; never reset, as people judge whether a run has recovered."""
        return not self._reported.isdisjoint(COLLAPSES)

    def see(self, row: Row) -> list[Alarm]:
        """The alarms that this row of metrics.jsonl raises. A value that is missing, null or not finite is
        ignored: it neither extends a streak nor ends it."""
        if (spread := _number(row, "reward_std")) is not None:
            self._spread.add(spread)
        step, alarms = int(_number(row, "step") or 0), list[Alarm]()
        for key, rule in (
            ("sampling/tail_2", self._tail),
            ("sampling/kl_k3", self._kl),
            ("reward", self._check_fall),
            ("grad_norm", self._gradient),
            ("entropy", self._check_entropy),
            ("completions/clipped_ratio", self._check_truncation),
        ):
            if (value := _number(row, key)) is not None:
                alarms += [alarm for sign in rule(value) if (alarm := self._judge(step, sign))]
        return alarms

    def _judge(self, step: int, sign: Sign) -> Alarm | None:
        """Update the streak of a rule; the alarm if it is met for the first time."""
        streak = self._streaks[sign.rule]
        if not sign.holds:
            streak.clear()
            return None
        streak.append(step)
        if len(streak) < sign.steps or sign.rule in self._reported:
            return None
        self._reported.add(sign.rule)
        return Alarm(step, streak[0], sign.rule, sign.rule in COLLAPSES, sign.sentence)

    def _tail(self, share: float) -> Iterator[Sign]:
        """The rule of F(2)."""
        limit = self._limits.tail
        sentence = (
            f"F(2) is {share:.2g}: trainer and sampler give that share of the tokens probabilities "
            f"more than a factor of 2 apart (limit {limit:g}), so what is learned is not what was sampled"
        )
        yield Sign(Rule.TAIL, self._limits.tail_steps, share > limit, sentence)

    def _kl(self, k3: float) -> Iterator[Sign]:
        """The rule of k3, against the median of its first values."""
        limits, early = self._limits, list(self._early)
        if len(early) < limits.kl_early:
            self._early.append(k3)
        if len(early) < limits.least:
            return
        start = median(early)
        limit = max(limits.kl_times * start, limits.kl_nats)
        sentence = (
            f"KL(sampler || trainer) is {k3:.2g} nats per token by k3, where its first steps had a "
            f"median of {start:.2g} (limit {limit:.2g})"
        )
        yield Sign(Rule.KL, limits.kl_steps, k3 > limit, sentence)

    def _check_fall(self, reward: float) -> Iterator[Sign]:
        """The rule of a fallen reward."""
        limits, course = self._limits, self._reward
        course.add(reward)
        if course.now is None:
            return
        # the fall in units of the gain before it, or of the deviation between answers if that is larger;
        # neither depends on the meaning of a reward of 0
        lost, scale = course.best - course.now, max(course.best - course.start, self._spread.now or 0.0)
        deep = lost > 0 and (lost / scale if scale > 0 else math.inf) > limits.reward_lost
        beyond_noise = lost > limits.reward_errors * course.error
        # if no reward was negative, 0 is a meaningful zero: a collapse must be below half of the highest too
        halved = course.lowest < 0 or course.now < course.best / 2
        sentence = (
            f"the reward is {course.now:.3g} after {course.best:.3g} at its highest and "
            f"{course.start:.3g} at the start (means of {course.window} steps)"
        )
        yield Sign(Rule.REWARD, limits.reward_steps, deep and beyond_noise and halved, sentence)

    def _gradient(self, norm: float) -> Iterator[Sign]:
        """The rule of the gradient norm, against the median of earlier norms."""
        if norm <= 0:  # a step without a gradient
            return
        limits, before = self._limits, len(self._norms)
        typical = median(self._norms) if before else 0.0
        insort(self._norms, norm)
        if before < limits.gradient_before:
            return
        sentence = f"the gradient norm is {norm:.3g}, {norm / typical:.0f} times the median before it"
        yield Sign(Rule.GRADIENT, limits.gradient_steps, norm > limits.gradient_times * typical, sentence)

    def _check_entropy(self, entropy: float) -> Iterator[Sign]:
        """The rules of low and of high entropy."""
        limits, course, reward = self._limits, self._entropy, self._reward
        course.add(entropy)
        if course.now is None:
            return
        current, start = course.now, course.start
        needed = reward.start + limits.thriving * (reward.best - reward.start)
        thriving = reward.now is not None and reward.now >= needed
        low = current < limits.entropy_left * start and not thriving
        high = current > max(limits.entropy_times * start, start + limits.entropy_nats) and course.rising
        sentence = f"entropy is {current:.3g} nats per token after {start:.3g} at the start"
        narrowed = f"{sentence}, and the reward is not near its best: the policy has narrowed"
        dissolving = f"{sentence} and rising: the policy is dissolving"
        yield Sign(Rule.ENTROPY_LOW, limits.entropy_steps, low, narrowed)
        yield Sign(Rule.ENTROPY_HIGH, limits.entropy_steps, high, dissolving)

    def _check_truncation(self, share: float) -> Iterator[Sign]:
        """The rules of truncated answers: at the start, as a warning, as an alarm."""
        limits, course = self._limits, self._truncated
        course.add(share)
        if course.now is None:
            return
        current, start, steps = course.now, course.start, limits.truncated_steps
        warning, alarm = limits.truncated_warning, limits.truncated_alarm
        was_low = course.least <= warning  # a share that began high and fell may rise again
        alarm_limit = alarm if was_low or start <= alarm else start + limits.truncated_rise
        sentence = f"{current:.0%} of the answers were cut by length (mean of {course.window} steps)"
        rose = f"{sentence} after {start:.0%} at the start"
        early = f"the run begins with truncated answers: {sentence}"
        alarm_sentence = (
            "truncation has risen to where published runs did not recover, and rollout.interrupt_after, "
            f"algo.overlong_buffer or more rollout.max_tokens end it: {rose}"
        )
        yield Sign(Rule.TRUNCATED_EARLY, steps, start > warning, early)
        yield Sign(Rule.TRUNCATED, steps, was_low and current > warning, f"truncation has risen: {rose}")
        yield Sign(Rule.TRUNCATED_MUCH, steps, current > alarm_limit, alarm_sentence)


def watch_after(rows: Iterable[Row], limits: Limits | None = None) -> Watch:
    """A watch that has already seen ``rows``, for a resumed run."""
    watch = Watch(limits)
    for row in rows:
        watch.see(row)
    return watch


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None
