"""Texts on a run's verdicts, the same in terminal, report and board: nothing was ever solved, or reward
functions failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.observe.report.reading import Row, number


def unsolved(evals: Sequence[Row]) -> str:
    """One sentence on why pass@1 is uninformative, if the evaluations of one set have no solved answer;
    empty if they have one, or no score."""
    scored = [row for row in evals if number(row, "pass@1") is not None]
    if not scored or any(row["pass@1"] > 0 for row in scored):
        return ""
    rewards = [reward for row in scored if (reward := number(row, "reward")) is not None]
    highest = max((most for row in scored if (most := number(row, "reward_max")) is not None), default=None)
    limit = number(scored[-1], "solved_at")
    if not rewards or highest is None or limit is None or highest <= 0:
        return "no held-out answer was ever solved, and none had a reward above 0"
    reached, needed = _told_apart(highest, limit)
    return (
        f"no held-out answer was ever solved, so pass@1 shows nothing: the highest reward was {reached}, "
        f"and an answer is solved from {needed} on (reward.solved_at); look at the mean reward, now "
        f"{rewards[-1]:.3f}, or set reward.solved_at to a reward that answers reach"
    )


def _told_apart(a: float, b: float) -> tuple[str, str]:
    """Both in as few digits, from three on, as show that they differ."""
    written = [(f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in range(3, 18)]
    return next((pair for pair in written if pair[0] != pair[1]), written[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A reward function that failed in a run."""

    sentence: str  # how often it failed, and its last failure: step, cause, line
    trace: str  # traceback of the last exception; empty if it never raised
    answer: str  # step, prompt and completion of that exception


def failed_rewards(rows: Iterable[Row]) -> list[Failed]:
    """From rows of failed_rewards.jsonl, in the order in which the functions first failed."""
    by_function: dict[str, list[Row]] = {}
    for row in rows:
        by_function.setdefault(str(row.get("function")), []).append(row)
    return [_failed(name, some) for name, some in by_function.items()]


def _failed(name: str, rows: Sequence[Row]) -> Failed:
    last, count = rows[-1], sum(number(row, "count") or 0 for row in rows)
    shown = next((row for row in reversed(rows) if row.get("trace")), last)
    part = "" if last.get("part") == "train" else f" in the evaluation of the set {last.get('part')}"
    return Failed(
        sentence=f"Reward {name} gave no verdict to {count:,.0f} answers, the last time at step "
        f"{last.get('step')}{part}: {last.get('detail')}",
        trace=str(shown.get("trace") or ""),
        answer=f"step {shown.get('step')}, prompt {shown.get('uid')}, completion {shown.get('completion')!r}",
    )
