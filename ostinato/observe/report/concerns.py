"""What a person should look at first, in words: each concern is one sentence with the step and the figure.

Rules are about the run as a whole or its last tenth, so that a healthy run says nothing. The thresholds are
judgements, kept together here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ostinato.observe.report.arms import arm, measured
from ostinato.observe.report.facts import difference, ends, estimate, steps_text
from ostinato.observe.report.reading import Row, RunData, column, first_step, last_step, mean, number, total
from ostinato.observe.report.verdicts import failed_rewards, unsolved

ZERO_VARIANCE_SHARE = 0.5  # of groups: half of the sampling taught nothing
TRUNCATED_SHARE = 0.1
ENTROPY_LEFT = 0.2  # of where it began
K3_NATS = 1e-3  # per token; exact arithmetic gives 0, bf16 rounding about 1e-4
ESS_LEFT = 0.9
SPIKE = 10.0  # gradient norm over its median
COVERED = 0.999  # of trained rows, with a recorded route
FAULT_SHARE = 0.01  # of answers
DRAFT_LOSS = 0.03  # of the rollouts' time, beyond what the estimate of it can be trusted with


class Level(StrEnum):
    BAD = "bad"  # the result is in doubt
    LOOK = "look"  # something costs money or signal
    NOTE = "note"  # good to know


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    level: Level
    text: str


def concerns(data: RunData) -> list[Concern]:
    """Everything noteworthy, the gravest first; empty when there is nothing."""
    found = [*_files(data), *_score(data), *_rewards(data)]
    if data.metrics:
        found += [*_alarms(data), *_training(data), *_signal(data), *_mismatch(data), *_replayed(data)]
        found += [*_losses(data), *_drafts(data)]
    order = list(Level)
    return sorted(found, key=lambda concern: order.index(concern.level))


def _files(data: RunData) -> Iterator[Concern]:
    for sentence in data.damage:
        yield Concern(level=Level.BAD, text=sentence)
    planned = data.setting("trainer.steps")
    done = last_step(data.metrics)
    if planned is not None and done < planned:
        text = f"Not finished: {done} of {planned} steps. The run is still going, or was stopped or killed."
        yield Concern(level=Level.NOTE, text=text)


def _score(data: RunData) -> Iterator[Concern]:
    scores = [(row["step"], score) for row in data.evals if (score := estimate(row, "pass@1")) is not None]
    if not scores:
        yield Concern(
            level=Level.NOTE, text="No held-out score was measured: nothing here shows generalisation."
        )
        return
    if ends(data)[0] is None:
        text = "The model before training was not measured (eval.at_start), so no gain can be stated."
        yield Concern(level=Level.LOOK, text=text)
    best_at, best = max(scores, key=lambda item: item[1].value)
    last_at, last = scores[-1]
    fall = difference(best, last).interval
    if fall is not None and fall[1] < 0:
        text = (
            f"The held-out score peaked at step {best_at} ({best.value:.3f}) and fell to "
            f"{last.value:.3f} at step {last_at}, more than chance explains."
        )
        yield Concern(level=Level.BAD, text=text)
    excluded = number(data.evals[-1], "excluded") or 0
    if excluded:
        text = f"{excluded:.0f} held-out prompts had too few verdicts for the score of step {last_at}."
        yield Concern(level=Level.LOOK, text=text)


def _rewards(data: RunData) -> Iterator[Concern]:
    if why := unsolved(data.evals):
        yield Concern(level=Level.BAD, text=f"{why[0].upper()}{why[1:]}.")
    for failed in failed_rewards(data.failed):
        yield Concern(level=Level.LOOK, text=f"{failed.sentence}; the traceback is under the faults.")


def _training(data: RunData) -> Iterator[Concern]:
    rows = data.metrics
    if refused := _when(rows, "refused_step"):
        why = "a loss or gradient was not finite"
        text = f"{_steps(refused)} refused because {why} (step {steps_text(refused)})."
        yield Concern(level=Level.BAD, text=text)
    if empty := _when(rows, "empty_step"):
        text = f"{_steps(empty)} empty: no sample was left to learn from (step {steps_text(empty)})."
        yield Concern(level=Level.LOOK, text=text)
    entropy = [row for row in rows if number(row, "entropy") is not None]
    tenth = _tenth(entropy)
    if len(entropy) >= 5 and (start := mean(entropy[: len(tenth)], "entropy")):
        left = (mean(tenth, "entropy") or 0.0) / start
        if left < ENTROPY_LEFT:
            text = (
                f"Entropy fell to {left:.0%} of where it began ({start:.3g} nats per token): "
                "little is left to explore."
            )
            yield Concern(level=Level.LOOK, text=text)
    norms = [(int(row["step"]), norm) for row in rows if (norm := number(row, "grad_norm")) is not None]
    if len(norms) >= 10:
        at, norm = max(norms, key=lambda item: item[1])
        typical = statistics.median(value for _, value in norms)
        if typical > 0 and norm > SPIKE * typical:
            text = (
                f"The gradient norm spiked to {norm:.3g} at step {at}, {norm / typical:.0f} times its median."
            )
            yield Concern(level=Level.LOOK, text=text)


def _alarms(data: RunData) -> Iterator[Concern]:
    """What the stability watch said while the run went on."""
    for alarm in data.alarms:
        since = alarm.get("since", alarm["step"])
        collapsed = bool(alarm.get("collapse"))
        text = (
            f"{'The run collapsed' if collapsed else 'The stability watch spoke up'} at step "
            f"{alarm['step']:.0f}: {alarm.get('sentence', alarm.get('rule', '?'))}, since step {since:.0f}."
        )
        yield Concern(level=Level.BAD if collapsed else Level.LOOK, text=text)


def _replayed(data: RunData) -> Iterator[Concern]:
    """Of the last full comparison of sampler and trainer."""
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
        yield Concern(level=Level.BAD, text=text)
    coverage = number(row, "coverage")
    if row.get("replay") and coverage is not None and coverage < COVERED:
        text = f"At step {row['step']}, {1 - coverage:.1%} of the rows had no recorded route to replay."
        yield Concern(level=Level.LOOK, text=text)


def _signal(data: RunData) -> Iterator[Concern]:
    tenth = _tenth(data.metrics)
    span = _span(tenth)
    share = mean(tenth, "frac_reward_zero_std")
    if share is not None and share > ZERO_VARIANCE_SHARE:
        none, every = mean(tenth, "solved_none") or 0.0, mean(tenth, "solved_all") or 0.0
        side = (
            "mostly solved by all: the task is too easy"
            if every > none
            else "mostly solved by none: it is too hard"
        )
        text = f"In {span}, {share:.0%} of groups had equal rewards and taught nothing, {side}."
        yield Concern(level=Level.LOOK, text=text)
    truncated = mean(tenth, "completions/clipped_ratio")
    if truncated is not None and truncated > TRUNCATED_SHARE:
        text = f"In {span}, {truncated:.0%} of answers were cut off, at {data.longest_answer}."
        yield Concern(level=Level.LOOK, text=text)


def _mismatch(data: RunData) -> Iterator[Concern]:
    worst = [
        (k3, int(row["step"])) for row in data.metrics if (k3 := number(row, "sampling/kl_k3")) is not None
    ]
    if worst and max(worst)[0] > K3_NATS:
        k3, at = max(worst)
        text = (
            f"Sampler and trainer disagree: KL (k3) reached {k3:.2g} nats per token at step {at}; "
            f"up to {K3_NATS:g} is rounding."
        )
        yield Concern(level=Level.LOOK, text=text)
    sizes = [
        (ess, int(row["step"])) for row in data.metrics if (ess := number(row, "sampling/ess")) is not None
    ]
    if sizes and min(sizes)[0] < ESS_LEFT:
        ess, at = min(sizes)
        text = f"The effective sample size fell to {ess:.0%} at step {at}: a few tokens carry the weight."
        yield Concern(level=Level.LOOK, text=text)


def _losses(data: RunData) -> Iterator[Concern]:
    rows = data.metrics
    answers = total(rows, "rollout/trajectories")
    for key, what in (("rollout/failed", "failed"), ("rollout/no_verdict", "got no verdict")):
        count = total(rows, key)
        if count:
            level = Level.BAD if answers and count / answers > FAULT_SHARE else Level.NOTE
            when = steps_text(_when(rows, key))
            text = f"{count:,.0f} of {answers:,.0f} answers {what}, in step {when}; see the faults below."
            yield Concern(level=level, text=text)


def _drafts(data: RunData) -> Iterator[Concern]:
    tenth = _tenth(data.metrics)
    saved, spent = total(tenth, "draft/seconds_saved"), total(tenth, "time/rollout_s")
    if spent and saved < -DRAFT_LOSS * spent:
        text = (
            f"In {_span(tenth)}, drafts made rollouts {-saved / spent:.0%} longer by the engine's estimate; "
            "draft.enabled = false does without."
        )
        yield Concern(level=Level.LOOK, text=text)


def _when(rows: Sequence[Row], key: str) -> list[int]:
    return [int(row["step"]) for row, value in zip(rows, column(rows, key), strict=True) if value]


def _steps(when: Sequence[int]) -> str:
    return "1 step was" if len(when) == 1 else f"{len(when)} steps were"


def _tenth(rows: Sequence[Row]) -> Sequence[Row]:
    """The last tenth of a run, at least one step."""
    return rows[-max(1, len(rows) // 10) :]


def _span(rows: Sequence[Row]) -> str:
    first, last = first_step(rows), last_step(rows)
    return f"step {last}" if first == last else f"steps {first} to {last}"
