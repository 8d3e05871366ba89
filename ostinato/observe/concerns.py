"""Concerns about a run, each a sentence with step and number: the warnings of page and terminal.

Rules look at the whole run or its last tenth, so that a healthy run has none. The thresholds are judgement
calls, kept together here; entropy, gradient norm and truncation are left to the stability watch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ostinato.observe.costs import WASTE
from ostinato.observe.figures import BASELINE, K3_NATS, finish, planned_steps, status, tenth
from ostinato.observe.gap import arm_of, select_measured
from ostinato.observe.rows import Row, RunRows, column, ends, mean, names_under, total
from ostinato.observe.stats import difference, estimate, number
from ostinato.tables import NONE, Line, Table, format_figure

ZERO_VARIANCE_SHARE = 0.5  # share of groups: half of the sampling taught nothing
# Rounding may send a token to another expert and change its probability by a factor of e: a k3 of e - 2.
# Means are taken over so many tokens that one such token does not raise them above K3_NATS. In a run of fewer
# tokens, more than five such tokens are required.
MISMATCH_TOKENS = (math.e - 2) / K3_NATS
REWARD_TIME = 0.5  # share of a step's time, after its last token
ESS_LEFT = 0.9
COVERED = 0.999  # share of trained rows with a recorded route
FAULT_SHARE = 0.01  # share of answers
DRAFT_LOSS = 0.03  # share of the rollouts' time; smaller losses are within the estimate's error
CHECKED = {"truncation": "completions/clipped_ratio", "entropy": "entropy", "gradient norm": "grad_norm"}


class Level(StrEnum):
    BAD = "bad"  # the result is in doubt
    LOOK = "look"  # something costs money or signal
    NOTE = "note"  # good to know


class Concern(NamedTuple):
    level: Level
    text: str
    about: str = ""  # the part of the page that shows more


def concerns(data: RunRows) -> list[Concern]:
    """All concerns, the most serious first; may be empty."""
    rows = data.metrics
    all_concerns = [*_files(data), *_score(data), *_check_rewards(data), *_report_alarms(data)]
    all_concerns += [
        *_counted(rows),
        *_check_signal(rows),
        *_check_mismatch(rows),
        *_check_replay(data),
        *_check_drafts(rows),
    ]
    return sorted(all_concerns, key=lambda concern: list(Level).index(concern.level))


def list_checks(data: RunRows) -> str:
    """What the rules look at, with figures that no other number shows: means of the last and first tenth."""
    texts = []
    for name, key in CHECKED.items():
        last, first = (mean(rows, key) for rows in (tenth(data.metrics), tenth(data.metrics, first=True)))
        values = f" {format_figure(last)} (at first {format_figure(first)})"
        texts.append(f"{name}{'' if last is None else values}")
    checked = ", ".join(texts)
    return f"{checked}, held-out score, faults, refused and empty steps, equal rewards, gap to the trainer"


def _files(data: RunRows) -> Iterator[Concern]:
    """Yield concerns about damaged or unread files, and an unfinished run."""
    for sentence in data.damage:
        yield Concern(Level.BAD, sentence)
    for name, bytes_left in data.reading.items():
        yield Concern(Level.NOTE, f"{name}.jsonl is being read: {bytes_left / 1e6:,.0f} MB are left.")
    planned, rows = planned_steps(data), data.logs["metrics"]
    is_planned = "tinker" not in data.recipe  # a client's loop is as long as the client says
    if is_planned and not finish(data) and status(data)["tone"] != "live":
        steps = f"{len(rows)} steps" if planned is None else f"{len(rows)} of {planned} steps"
        yield Concern(
            Level.NOTE, f"Not finished: {steps}. The run was stopped or killed, or goes on elsewhere."
        )


def _score(data: RunRows) -> Iterator[Concern]:
    """Yield concerns about the held-out score: missing, fallen, or with prompts left out."""
    rows = data.evals
    scores = [(row["step"], score) for row in rows if (score := estimate(row, "pass@1")) is not None]
    if not scores:
        text = "No held-out score was measured: nothing here shows generalisation."
        yield Concern(Level.NOTE, text, "score")
        return
    if ends(rows)[0] is None:
        yield Concern(Level.LOOK, f"{BASELINE[0].upper()}{BASELINE[1:]}.", "score")
    best_at, best = max(scores, key=lambda item: item[1].value)
    last_at, last = scores[-1]
    if (fall := difference(best, last).interval) is not None and fall[1] < 0:
        peak = f"The held-out score peaked at step {best_at} ({best.value:.3f})"
        fell = f"fell to {last.value:.3f} at step {last_at}, more than chance explains."
        yield Concern(Level.BAD, f"{peak} and {fell}", "score")
    if excluded := number(rows[-1], "excluded"):
        text = f"{excluded:.0f} held-out prompts had too few verdicts for the score of step {last_at}."
        yield Concern(Level.LOOK, text, "faults")


def _check_rewards(data: RunRows) -> Iterator[Concern]:
    """Yield concerns about rewards that solve no answer, or failed."""
    if reason := unsolved(data.evals):
        yield Concern(Level.BAD, f"{reason[0].upper()}{reason[1:]}.", "score")
    for failed in failed_rewards(data.logs["failed_rewards"]):
        yield Concern(Level.LOOK, f"{failed.sentence}; the traceback is under the faults.", "faults")


def _report_alarms(data: RunRows) -> Iterator[Concern]:
    """Yield the alarms of the stability watch."""
    for alarm in data.logs["watch"]:
        step, collapsed = number(alarm, "step") or 0, bool(alarm.get("collapse"))
        event = "The run collapsed" if collapsed else "The stability watch raised an alarm"
        since = number(alarm, "since") or step
        reason = f"{alarm.get('sentence', alarm.get('rule', '?'))}, since step {since:.0f}"
        yield Concern(
            Level.BAD if collapsed else Level.LOOK, f"{event} at step {step:.0f}: {reason}.", "policy"
        )


def _check_replay(data: RunRows) -> Iterator[Concern]:
    """Yield concerns about replay, from the last full comparison of sampler and trainer."""
    rows = select_measured(data)
    if not rows or not arm_of(rows[-1], "replay"):
        return
    row = rows[-1]
    native, replayed = number(arm_of(row, "native"), "k3_high"), number(arm_of(row, "replay"), "k3_low")
    if native is not None and replayed is not None and replayed > native:
        text = (
            f"Replay made the mismatch worse at step {row['step']}: k3 is at least {replayed:.2g} nats per "
            f"token with the sampler's experts and at most {native:.2g} without, as with misaligned routes."
        )
        yield Concern(Level.BAD, text, "gap")
    coverage = number(row, "coverage")
    if row.get("replay") and coverage is not None and coverage < COVERED:
        text = f"At step {row['step']}, {1 - coverage:.1%} of the rows had no recorded route to replay."
        yield Concern(Level.LOOK, text, "gap")


def _check_signal(rows: Sequence[Row]) -> Iterator[Concern]:
    """Yield concerns if most groups had equal rewards, and if steps waited for rewards."""
    if (waited := mean(tenth(rows), "time/reward_share") or 0.0) > REWARD_TIME:
        text = (
            f"steps waited for rewards {waited:.0%} of their time: raise reward.workers, or make them faster."
        )
        yield Concern(Level.LOOK, f"In {_name_span(tenth(rows))}, {text}", "cost")
    share = mean(tenth(rows), "frac_reward_zero_std")
    if share is not None and share > ZERO_VARIANCE_SHARE:
        none, every = mean(tenth(rows), "solved_none") or 0.0, mean(tenth(rows), "solved_all") or 0.0
        side = "all: the task is too easy" if every > none else "none: it is too hard"
        text = f"{share:.0%} of groups had equal rewards and taught nothing, mostly solved by {side}."
        yield Concern(Level.LOOK, f"In {_name_span(tenth(rows))}, {text}", "signal")


def _check_mismatch(rows: Sequence[Row]) -> Iterator[Concern]:
    """Yield concerns about the KL and the effective sample size between sampler and trainer."""
    k3, step = max(_pool_means(rows, "sampling/kl_k3"), default=(0.0, 0))
    if not step:
        measured_rows = [
            row for row in rows if number(row, "sampling/kl_k3") is not None and number(row, "tokens/trained")
        ]
        tokens = sum(row["tokens/trained"] for row in measured_rows)
        nats = sum(row["sampling/kl_k3"] * row["tokens/trained"] for row in measured_rows)
        k3, step = (nats / tokens, int(measured_rows[-1]["step"])) if nats > 5 * (math.e - 2) else (k3, step)
    if k3 > K3_NATS:
        reached = f"KL (k3) reached {k3:.2g} nats per token at step {step}; up to {K3_NATS:g} is rounding"
        yield Concern(Level.LOOK, f"Sampler and trainer disagree: {reached}.", "gap")
    ess, step = min(_pool_means(rows, "sampling/ess"), default=(1.0, 0))
    if ess < ESS_LEFT:
        text = f"The effective sample size fell to {ess:.0%} at step {step}: a few tokens carry the weight."
        yield Concern(Level.LOOK, text, "gap")


# metric, level, what the steps that have it were
STEPS = (
    ("refused_step", Level.BAD, "refused because a loss or gradient was not finite"),
    ("empty_step", Level.LOOK, "empty: no sample was left to learn from"),
)
ANSWERS = (("rollout/failed", "failed"), ("rollout/no_verdict", "got no verdict"))


def _counted(rows: Sequence[Row]) -> Iterator[Concern]:
    """Yield concerns about refused and empty steps, and answers without a verdict."""
    answers = total(rows, "rollout/trajectories")
    for key, level, what in STEPS:
        if numbers := _find_steps(rows, key):
            steps = "1 step was" if len(numbers) == 1 else f"{len(numbers)} steps were"
            yield Concern(level, f"{steps} {what} (step {steps_text(numbers)}).", "faults")
    for key, what in ANSWERS:
        if count := total(rows, key):
            level = Level.BAD if answers and count / answers > FAULT_SHARE else Level.NOTE
            text = (
                f"{count:,.0f} of {answers:,.0f} answers {what}, in step {steps_text(_find_steps(rows, key))}"
            )
            yield Concern(level, f"{text}; see the faults.", "faults")


def _check_drafts(rows: Sequence[Row]) -> Iterator[Concern]:
    """Yield a concern if drafts made rollouts longer, by more than the estimates of single steps differ."""
    last = rows[-max(8, len(tenth(rows))) :]
    pairs = zip(column(last, "draft/seconds_saved"), column(last, "time/rollout_s"), strict=True)
    losses = [-saved / spent for saved, spent in pairs if saved is not None and spent]
    if len(losses) < 3:
        return
    loss, error = statistics.mean(losses), statistics.stdev(losses) / math.sqrt(len(losses))
    if loss - 2 * error > DRAFT_LOSS:
        text = f"drafts made rollouts {loss:.0%} longer by the engine's estimate"
        text = f"In {_name_span(last)}, {text}; draft.enabled = false does without."
        yield Concern(Level.LOOK, text, "drafts")


def _find_steps(rows: Sequence[Row], key: str) -> list[int]:
    """The steps whose row has a nonzero ``key``."""
    return [int(row["step"]) for row, value in zip(rows, column(rows, key), strict=True) if value]


def _pool_means(rows: Sequence[Row], key: str) -> Iterator[tuple[float, int]]:
    """(mean of ``key`` over trained tokens, last step) of successive series of MISMATCH_TOKENS or more."""
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


def _name_span(rows: Sequence[Row]) -> str:
    first, last = int(rows[0]["step"]), int(rows[-1]["step"])
    return f"step {last}" if first == last else f"steps {first} to {last}"


# ---- verdicts of rewards


def unsolved(evals: Sequence[Row]) -> str:
    """The reason why pass@1 is uninformative, if no answer in the evaluations of a set is solved; empty if
    one is, or there is no score."""
    scored = [row for row in evals if number(row, "pass@1") is not None]
    if not scored or any(row["pass@1"] > 0 for row in scored):
        return ""
    rewards = [reward for row in scored if (reward := number(row, "reward")) is not None]
    highest = max(
        (maximum for row in scored if (maximum := number(row, "reward_max")) is not None), default=None
    )
    limit = number(scored[-1], "solved_at")
    if not rewards or highest is None or limit is None or highest <= 0:
        return "no held-out answer was ever solved, and none had a reward above 0"
    reached, needed = _format_apart(highest, limit)
    return (
        f"no held-out answer was ever solved, so pass@1 shows nothing: the highest reward was {reached}, "
        f"and an answer is solved from {needed} on (reward.solved_at); look at the mean reward, now "
        f"{rewards[-1]:.3f}, or set reward.solved_at to a reward that answers reach"
    )


def _format_apart(a: float, b: float) -> tuple[str, str]:
    """Both numbers as texts, with the fewest digits, at least three, that show a difference."""
    written = [(f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in range(3, 18)]
    return next((pair for pair in written if pair[0] != pair[1]), written[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A reward function that failed in a run."""

    sentence: str  # how often it failed, and its last failure: step, cause, line
    trace: str  # traceback of the last exception; empty if it never raised
    answer: str  # step, prompt and completion of that exception


def failed_rewards(rows: Iterable[Row]) -> list[Failed]:
    """Failed reward functions from rows of failed_rewards.jsonl, in the order of their first failure."""
    by_function: dict[str, list[Row]] = {}
    for row in rows:
        by_function.setdefault(str(row.get("function")), []).append(row)
    return [_summarize_failures(name, function_rows) for name, function_rows in by_function.items()]


def _summarize_failures(name: str, rows: Sequence[Row]) -> Failed:
    """The summary of the failures of one function."""
    last, count = rows[-1], sum(number(row, "count") or 0 for row in rows)
    shown = next((row for row in reversed(rows) if row.get("trace")), last)
    part = "" if last.get("part") == "train" else f" in the evaluation of the set {last.get('part')}"
    return Failed(
        sentence=f"Reward {name} gave no verdict to {count:,.0f} answers, the last time at step "
        f"{last.get('step')}{part}: {last.get('detail')}",
        trace=str(shown.get("trace") or ""),
        answer=f"step {shown.get('step')}, prompt {shown.get('uid')}, completion {shown.get('completion')!r}",
    )


# ---- faults

EVENTS = {
    "reward_workers": "in the processes that run rewards",
    "rewards": "in one reward function, by answers",
    "tools": "in the tools of episodes",
}


def count_faults(data: RunRows) -> Table:
    """Counts of failed episodes, missing verdicts, faults, events, dropped groups and refused steps."""
    rows = data.metrics
    answers, groups = total(rows, "rollout/trajectories"), total(rows, "rollout/groups")
    keys = sorted(key for key in set[str]().union(*rows) if key.partition("/")[0] in EVENTS)
    faults = [
        ("rollout/failed", "episodes failed", "ended in an error, not trained on", answers),
        ("rollout/no_verdict", "answers without a verdict", "never scored as 0", answers),
        *((f"faults/{name}", f"fault: {name}", "", answers) for name in names_under(rows, "faults/")),
        *(
            (key, f"event: {key}", EVENTS[key.partition("/")[0]], 0)
            for key in keys
            if key.rpartition("/")[2] not in ("mean", "std", "calls")  # statistics of rewards, no counts
        ),
        ("groups/dropped", "groups dropped", "not trained on", groups),
        *(
            (f"groups/dropped/{name}", f"dropped: {name}", WASTE.get(name, ""), groups)
            for name in names_under(rows, "groups/dropped/")
        ),
        ("refused_step", "steps refused", "a loss or gradient was not finite", len(rows)),
        ("empty_step", "steps with nothing to learn", "no sample was left", len(rows)),
    ]
    lines: list[Line] = []
    for key, name, meaning, of in faults if rows else ():
        count, steps = total(rows, key), steps_text(_find_steps(rows, key))
        share = "" if not of else "< 0.1 %" if 0 < count / of < 0.001 else f"{100 * count / of:.1f} %"
        lines.append((f"{name}\n{meaning}", f"{count:,.0f}", share, steps or NONE))
    return Table(title="Faults", head=("count", "share", "in step"), rows=lines, words=("in step",))


def steps_text(steps: Sequence[int], most: int = 3) -> str:
    """The first ``most`` spans of steps, as in "3, 7, 9 to 12 and 4 more up to 61"; empty without steps."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1].append(step)
        else:
            spans.append([step])
    shown = ", ".join(
        f"{span[0]} to {span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans[:most]
    )
    more = sum(len(span) for span in spans[most:])
    return f"{shown} and {more} more up to {steps[-1]}" if more else shown
