"""Drafts (speculative decoding) in a run: stores the answers of a step for later steps, and makes metrics.

    finished groups -> pasts -> store       the drafts of each prompt's next epoch come from here
                    -> lengths              predict its next answers: the longest are admitted first
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
    """Drafts in a run. Call ``begin`` before a step's rollouts, and ``end`` when its groups are final."""

    store: Store
    lengths: Lengths
    drafter: HistoryDrafter
    saved_s: Callable[[], float]  # seconds that drafts have saved so far, by the engine's cost table

    def begin(self) -> None:
        """Start to count drafts for the step, from the present counters on."""
        self._stats, self._saved_s = self.drafter.stats(), self.saved_s()

    def end(self, groups: Sequence[Group], step: int, rollout_s: float) -> dict[str, float]:
        """Return the metrics of the step, whose rollouts took ``rollout_s``; store its answers and their
        lengths, and drop the live text of its prompts."""
        stats = self.drafter.stats() - self._stats
        num_sampled = sum(
            _count_sampled(answer) for answers in _group_by_prompt(groups).values() for answer in answers
        )
        row = count_drafts(groups) | compute_figures(stats, num_sampled, rollout_s)
        row["draft/seconds_saved"] = self.saved_s() - self._saved_s
        return row | self._store_answers(groups, step)

    def forget(self, prompts: Iterable[Prompt]) -> None:
        """Drop the live text of prompts whose answers are not stored (an evaluation's)."""
        self.drafter.forget([prompt.uid for prompt in prompts])

    def _store_answers(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        entries, num_skipped = collect_answers(groups)
        for uid, answers in entries.items():
            self.store.add(uid, step, answers)
        for uid, completions in _group_by_prompt(groups).items():
            self.lengths.observe(uid, [_count_sampled(completion) for completion in completions], step=step)
        self.forget(group.prompt for group in groups)
        extra = {"draft/not_remembered": float(num_skipped)} if num_skipped else {}
        return {
            "draft/history_tokens": float(self.store.num_tokens),
            "draft/history_bytes": float(self.store.num_bytes),
            **extra,
        }


def collect_answers(groups: Iterable[Group]) -> tuple[dict[str, list[HistoryEntry]], int]:
    """Return (the answers of the groups as entries of history, by prompt; the number of answers left out).

    Each turn is an entry of its own, with the last tokens before it as context and the reward of its
    episode. An interrupted answer is an entry for each sampled part; the context of the later part has the
    injected phrase. Only answers with the edges of their uniforms (``Completion.edges``) are kept, and no
    failed ones, whose numbers may be not finite.
    """
    entries: dict[str, list[HistoryEntry]] = {}
    num_skipped = 0
    for group in groups:
        for trajectory in group.trajectories:
            reward = None if trajectory.reward is None else trajectory.reward.value
            context = np.zeros(0, np.int32)
            for turn in trajectory.turns:
                context = _join_tail(context, turn.context)
                new_entries = _make_entries(context, turn.completion, reward)
                context = _join_tail(context, turn.completion.tokens)
                if new_entries:
                    entries.setdefault(group.prompt.uid, []).extend(new_entries)
                num_skipped += not new_entries
    return entries, num_skipped


def _make_entries(context: np.ndarray, completion: Completion, reward: float | None) -> list[HistoryEntry]:
    """Make an entry of each part of the answer that was sampled without an interruption; none for an answer
    that failed or has no edges."""
    edges = completion.edges
    if edges is None or completion.stop is Stop.ERROR:
        return []
    return [
        HistoryEntry(
            context=_join_tail(context, completion.tokens[: part.start]),
            tokens=completion.tokens[part],
            probs=np.exp(completion.logprobs[part]),
            edges=edges[part],
            reward=reward,
        )
        for part in _find_sampled_parts(completion)
    ]


def _find_sampled_parts(completion: Completion) -> list[slice]:
    """Return the spans of sampled tokens: a single span where nothing was injected."""
    if completion.injected is None:
        return [slice(0, len(completion.tokens))]
    ends = np.flatnonzero(np.diff(~completion.injected, prepend=False, append=False)).tolist()
    return [slice(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]


def _count_sampled(completion: Completion) -> int:
    return len(completion.tokens) - completion.num_injected


def _join_tail(old_tokens: np.ndarray, new_tokens: np.ndarray) -> np.ndarray:
    """Return the last CONTEXT tokens of ``old_tokens`` followed by ``new_tokens``."""
    return (new_tokens if len(new_tokens) >= CONTEXT else np.concatenate([old_tokens, new_tokens]))[-CONTEXT:]


def count_drafts(groups: Sequence[Group]) -> dict[str, float]:
    """Compute draft metrics from the answers themselves, including those read back from the spool."""
    answers = [
        completion
        for completions in _group_by_prompt(groups).values()
        for completion in completions
        if completion.passes
    ]
    passes, tokens = sum(answer.passes for answer in answers), sum(map(_count_sampled, answers))
    drafted, accepted = sum(answer.drafted for answer in answers), sum(answer.accepted for answer in answers)
    return {
        "tokens/drafted": float(drafted),
        "tokens/accepted": float(accepted),
        "draft/tokens_per_pass": _divide(tokens, passes),
        "draft/drafted_per_pass": _divide(drafted, passes),
        "draft/acceptance": _divide(accepted, drafted),
    }


def compute_figures(stats: DraftStats, sampled: int, rollout_s: float) -> dict[str, float]:
    """Compute metrics from the drafter's counters of a step; shares are of all tokens ``sampled`` in it, also
    where nothing was drafted."""
    shares = {f"draft/share_{name}": _divide(count, sampled) for name, count in stats.accepted.items()}
    return shares | {"draft/cpu_share": _divide(stats.seconds, rollout_s)}


def _group_by_prompt(groups: Iterable[Group]) -> dict[str, list[Completion]]:
    """Return the answers of each prompt by uid, without empty ones."""
    answers: dict[str, list[Completion]] = {}
    for group in groups:
        turns = (turn for trajectory in group.trajectories for turn in trajectory.turns)
        answers.setdefault(group.prompt.uid, []).extend(
            t.completion for t in turns if len(t.completion.tokens)
        )
    return {uid: completions for uid, completions in answers.items() if completions}


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
