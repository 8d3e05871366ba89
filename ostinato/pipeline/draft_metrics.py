"""Drafts (speculative decoding) in a run: what a step stores for later ones, and the drafting metrics.

    finished groups -> pasts -> store       the drafts of each prompt's next epoch come from here
                    -> lengths              how long its answers will be: the longest are admitted first
    drafter, engine -> metrics of the step

Nothing here can change a token: without the store, or with another run's, a run samples the same and takes
longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ostinato.history.blocks import CONTEXT
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.lengths import Lengths
from ostinato.history.rules import DraftStats
from ostinato.types import Completion, Group, HistoryEntry, Prompt, Stop


class Store(Protocol):
    """Answers by prompt: ``history.store.History``."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def add(self, uid: str, step: int, pasts: Sequence[HistoryEntry]) -> None: ...


@dataclass(kw_only=True)
class Drafting:
    """Drafts in a run. ``begin`` before a step's rollouts, ``end`` when its groups are final."""

    store: Store
    lengths: Lengths
    drafter: HistoryDrafter
    saved_s: Callable[[], float]  # seconds that drafts have saved so far, by the engine's cost table

    def begin(self) -> None:
        """Count what is drafted from here on for the step."""
        self._stats, self._saved_s = self.drafter.stats(), self.saved_s()

    def end(self, groups: Sequence[Group], step: int, rollout_s: float) -> dict[str, float]:
        """The metrics of the step, whose rollouts took ``rollout_s``; then its answers are remembered."""
        stats = self.drafter.stats() - self._stats
        sampled = sum(_num_sampled(answer) for answers in _by_prompt(groups).values() for answer in answers)
        row = counts(groups) | figures(stats, sampled, rollout_s)
        row["draft/seconds_saved"] = self.saved_s() - self._saved_s
        return row | self._remember(groups, step)

    def forget(self, prompts: Iterable[Prompt]) -> None:
        """Drop the live text of prompts that are done with and not remembered (an evaluation's)."""
        self.drafter.forget([prompt.uid for prompt in prompts])

    def _remember(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        kept, num_skipped = pasts(groups)
        for uid, answers in kept.items():
            self.store.add(uid, step, answers)
        for uid, completions in _by_prompt(groups).items():
            self.lengths.observe(uid, [_num_sampled(completion) for completion in completions], step=step)
        self.forget(group.prompt for group in groups)
        skipped = {"draft/not_remembered": float(num_skipped)} if num_skipped else {}
        return {
            "draft/history_tokens": float(self.store.num_tokens),
            "draft/history_bytes": float(self.store.num_bytes),
            **skipped,
        }


def pasts(groups: Iterable[Group]) -> tuple[dict[str, list[HistoryEntry]], int]:
    """(every answer of the groups as history keeps it, by prompt; how many could not be kept).

    Each turn is an entry of its own, with the last tokens before it as context and the reward of its episode;
    so is the part after an interruption, with the injected phrase (not sampled) in its context. Only answers
    that record where each uniform fell (``Completion.edges``) are kept, and no failed ones, whose numbers may
    be broken.
    """
    kept: dict[str, list[HistoryEntry]] = {}
    num_skipped = 0
    for group in groups:
        for trajectory in group.trajectories:
            reward = None if trajectory.reward is None else trajectory.reward.value
            before = np.zeros(0, np.int32)
            for turn in trajectory.turns:
                before = _tail(before, turn.context)
                found = _pasts(before, turn.completion, reward)
                before = _tail(before, turn.completion.tokens)
                if found:
                    kept.setdefault(group.prompt.uid, []).extend(found)
                num_skipped += not found
    return kept, num_skipped


def _pasts(context: np.ndarray, completion: Completion, reward: float | None) -> list[HistoryEntry]:
    """Each stretch of the answer that was sampled in one go."""
    edges = completion.edges
    if edges is None or completion.stop is Stop.ERROR:
        return []
    return [
        HistoryEntry(
            context=_tail(context, completion.tokens[: part.start]),
            tokens=completion.tokens[part],
            probs=np.exp(completion.logprobs[part]),
            edges=edges[part],
            reward=reward,
        )
        for part in _sampled_parts(completion)
    ]


def _sampled_parts(completion: Completion) -> list[slice]:
    """Where the answer was sampled; the whole of it where nothing was injected."""
    if completion.injected is None:
        return [slice(0, len(completion.tokens))]
    ends = np.flatnonzero(np.diff(~completion.injected, prepend=False, append=False)).tolist()
    return [slice(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]


def _num_sampled(completion: Completion) -> int:
    return len(completion.tokens) - completion.num_injected


def _tail(before: np.ndarray, new: np.ndarray) -> np.ndarray:
    return (new if len(new) >= CONTEXT else np.concatenate([before, new]))[-CONTEXT:]


def counts(groups: Sequence[Group]) -> dict[str, float]:
    """Draft metrics recorded in the answers themselves, including those read back from the spool."""
    passed = [
        completion
        for completions in _by_prompt(groups).values()
        for completion in completions
        if completion.passes
    ]
    passes, tokens = sum(one.passes for one in passed), sum(map(_num_sampled, passed))
    drafted, accepted = sum(one.drafted for one in passed), sum(one.accepted for one in passed)
    return {
        "tokens/drafted": float(drafted),
        "tokens/accepted": float(accepted),
        "draft/tokens_per_pass": _ratio(tokens, passes),
        "draft/drafted_per_pass": _ratio(drafted, passes),
        "draft/acceptance": _ratio(accepted, drafted),
    }


def figures(stats: DraftStats, sampled: int, rollout_s: float) -> dict[str, float]:
    """What the drafter counted in a step; shares are of all tokens ``sampled`` in it, also where nothing
    was drafted."""
    shares = {f"draft/share_{name}": _ratio(count, sampled) for name, count in stats.accepted.items()}
    return shares | {"draft/cpu_share": _ratio(stats.seconds, rollout_s)}


def _by_prompt(groups: Iterable[Group]) -> dict[str, list[Completion]]:
    """All answers, empty ones left out."""
    answers: dict[str, list[Completion]] = {}
    for group in groups:
        turns = (turn for trajectory in group.trajectories for turn in trajectory.turns)
        answers.setdefault(group.prompt.uid, []).extend(
            t.completion for t in turns if len(t.completion.tokens)
        )
    return {uid: completions for uid, completions in answers.items() if completions}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
