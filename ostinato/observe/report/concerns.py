"""What to look at first in a run: each concern is one sentence with the step and the number.

Rules look at the whole run or its last tenth, so that a healthy run has no concerns. The thresholds are
judgement calls, kept together here; entropy, gradient norm and truncation are left to the stability watch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from ostinato.observe.report.facts import (
    best_score,
    difference,
    ends,
    estimate,
    finish,
    planned_steps,
    steps_text,
)
from ostinato.observe.report.mismatch import arm, measured
from ostinato.observe.report.reading import Row, RunData, column, first_step, last_step, mean, number, total
from ostinato.observe.report.verdicts import failed_rewards, unsolved

ZERO_VARIANCE_SHARE = 0.5  # of groups: half of the sampling taught nothing
K3_NATS = 1e-3  # per token; exact arithmetic gives 0, bf16 rounding about 1e-4
# Rounding alone may send a single token to another expert, and its probability off by a factor of e: a k3 of
# e - 2. Means are judged over so many tokens that one such token does not raise them above K3_NATS.
MISMATCH_TOKENS = (math.e - 2) / K3_NATS
ESS_LEFT = 0.9
COVERED = 0.999  # of trained rows, with a recorded route
FAULT_SHARE = 0.01  # of answers
DRAFT_LOSS = 0.03  # of the rollouts' time; smaller losses are within the estimate's error


class Level(StrEnum):
    BAD = "bad"  # the result is in doubt
    LOOK = "look"  # something costs money or signal
    NOTE = "note"  # good to know


class Concern(NamedTuple):
    level: Level
    text: str


def concerns(data: RunData) -> list[Concern]:
    """All concerns, the most serious first; may be empty."""
    found = [*_files(data), *_score(data), *_rewards(data)]
    if data.metrics:
        found += [*_alarms(data), *_counted(data), *_signal(data), *_mismatch(data), *_replayed(data)]
        found += _drafts(data)
    order = list(Level)
    return sorted(found, key=lambda concern: order.index(concern.level))


def _files(data: RunData) -> Iterator[Concern]:
    for sentence in data.damage:
        yield Concern(Level.BAD, sentence)
    planned, done = planned_steps(data), last_step(data.metrics)
    if not finish(data):
        state = "The run is still going, or was stopped or killed."
        steps = f"{done} steps" if planned is None else f"{done} of {planned} steps"
        yield Concern(Level.NOTE, f"Not finished: {steps}. {state}")


def _score(data: RunData) -> Iterator[Concern]:
    scores = [(row["step"], score) for row in data.evals if (score := estimate(row, "pass@1")) is not None]
    if not scores:
        yield Concern(Level.NOTE, "No held-out score was measured: nothing here shows generalisation.")
        return
    if ends(data.evals)[0] is None:
        text = "The model before training was not measured (eval.at_start), so no gain can be stated."
        yield Concern(Level.LOOK, text)
    best_at, best = best_score(data) or scores[-1]
    last_at, last = scores[-1]
    if (fall := difference(best, last).interval) is not None and fall[1] < 0:
        peak = f"The held-out score peaked at step {best_at} ({best.value:.3f})"
        fell = f"fell to {last.value:.3f} at step {last_at}, more than chance explains."
        yield Concern(Level.BAD, f"{peak} and {fell}")
    if excluded := number(data.evals[-1], "excluded"):
        text = f"{excluded:.0f} held-out prompts had too few verdicts for the score of step {last_at}."
        yield Concern(Level.LOOK, text)


def _rewards(data: RunData) -> Iterator[Concern]:
    if why := unsolved(data.evals):
        yield Concern(Level.BAD, f"{why[0].upper()}{why[1:]}.")
    for failed in failed_rewards(data.failed):
        yield Concern(Level.LOOK, f"{failed.sentence}; the traceback is under the faults.")


def _alarms(data: RunData) -> Iterator[Concern]:
    """What the stability watch reported during the run."""
    for alarm in data.alarms:
        step, collapsed = alarm["step"], bool(alarm.get("collapse"))
        what = "The run collapsed" if collapsed else "The stability watch raised an alarm"
        why = f"{alarm.get('sentence', alarm.get('rule', '?'))}, since step {alarm.get('since', step):.0f}"
        yield Concern(Level.BAD if collapsed else Level.LOOK, f"{what} at step {step:.0f}: {why}.")


def _replayed(data: RunData) -> Iterator[Concern]:
    """Concerns about replay, from the last full comparison of sampler and trainer."""
    rows = measured(data)
    if not rows or not arm(rows[-1], "replay"):
        return
    row = rows[-1]
    native, replayed = number(arm(row, "native"), "k3_high"), number(arm(row, "replay"), "k3_low")
    if native is not None and replayed is not None and replayed > native:
        text = (
            f"Replay made the mismatch worse at step {row['step']}: k3 is at least {replayed:.2g} nats per "
            f"token with the sampler's experts and at most {native:.2g} without, as with misaligned routes."
        )
        yield Concern(Level.BAD, text)
    coverage = number(row, "coverage")
    if row.get("replay") and coverage is not None and coverage < COVERED:
        text = f"At step {row['step']}, {1 - coverage:.1%} of the rows had no recorded route to replay."
        yield Concern(Level.LOOK, text)


def _signal(data: RunData) -> Iterator[Concern]:
    tenth = _tenth(data.metrics)
    share = mean(tenth, "frac_reward_zero_std")
    if share is not None and share > ZERO_VARIANCE_SHARE:
        none, every = mean(tenth, "solved_none") or 0.0, mean(tenth, "solved_all") or 0.0
        side = "all: the task is too easy" if every > none else "none: it is too hard"
        text = f"{share:.0%} of groups had equal rewards and taught nothing, mostly solved by {side}."
        yield Concern(Level.LOOK, f"In {_span(tenth)}, {text}")


def _mismatch(data: RunData) -> Iterator[Concern]:
    k3, at = max(_pooled(data.metrics, "sampling/kl_k3"), default=(0.0, 0))
    if k3 > K3_NATS:
        reached = f"KL (k3) reached {k3:.2g} nats per token at step {at}; up to {K3_NATS:g} is rounding"
        yield Concern(Level.LOOK, f"Sampler and trainer disagree: {reached}.")
    ess, at = min(_pooled(data.metrics, "sampling/ess"), default=(1.0, 0))
    if ess < ESS_LEFT:
        text = f"The effective sample size fell to {ess:.0%} at step {at}: a few tokens carry the weight."
        yield Concern(Level.LOOK, text)


# metric, level, what the steps that have it were
STEPS = (
    ("refused_step", Level.BAD, "refused because a loss or gradient was not finite"),
    ("empty_step", Level.LOOK, "empty: no sample was left to learn from"),
)
ANSWERS = (("rollout/failed", "failed"), ("rollout/no_verdict", "got no verdict"))


def _counted(data: RunData) -> Iterator[Concern]:
    rows, answers = data.metrics, total(data.metrics, "rollout/trajectories")
    for key, level, what in STEPS:
        if when := _when(rows, key):
            steps = "1 step was" if len(when) == 1 else f"{len(when)} steps were"
            yield Concern(level, f"{steps} {what} (step {steps_text(when)}).")
    for key, what in ANSWERS:
        if count := total(rows, key):
            level = Level.BAD if answers and count / answers > FAULT_SHARE else Level.NOTE
            text = f"{count:,.0f} of {answers:,.0f} answers {what}, in step {steps_text(_when(rows, key))}"
            yield Concern(level, f"{text}; see the faults below.")


def _drafts(data: RunData) -> Iterator[Concern]:
    tenth = _tenth(data.metrics)
    saved, spent = total(tenth, "draft/seconds_saved"), total(tenth, "time/rollout_s")
    if spent and saved < -DRAFT_LOSS * spent:
        text = f"drafts made rollouts {-saved / spent:.0%} longer by the engine's estimate"
        yield Concern(Level.LOOK, f"In {_span(tenth)}, {text}; draft.enabled = false does without.")


def _when(rows: Sequence[Row], key: str) -> list[int]:
    return [int(row["step"]) for row, value in zip(rows, column(rows, key), strict=True) if value]


def _pooled(rows: Sequence[Row], key: str) -> Iterator[tuple[float, int]]:
    """(mean over trained tokens, last step) of each series of steps with MISMATCH_TOKENS or more together."""
    tokens = weighted = 0.0
    for row in rows:
        value, trained = number(row, key), number(row, "tokens/trained")
        if value is None or trained == 0:
            continue
        trained = MISMATCH_TOKENS if trained is None else trained  # of older runs
        tokens, weighted = tokens + trained, weighted + value * trained
        if tokens >= MISMATCH_TOKENS:
            yield weighted / tokens, int(row["step"])
            tokens = weighted = 0.0


def _tenth(rows: Sequence[Row]) -> Sequence[Row]:
    """The last tenth of a run, at least one step."""
    return rows[-max(1, len(rows) // 10) :]


def _span(rows: Sequence[Row]) -> str:
    first, last = first_step(rows), last_step(rows)
    return f"step {last}" if first == last else f"steps {first} to {last}"
