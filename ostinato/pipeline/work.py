"""What a step had to compute, read off its data: the ``Work`` of rollouts, of a batch, of a training step.

A token at position p of its sequence is one row, which sees p + 1 positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ostinato.model.flops import FlopModel, Work
from ostinato.types import Batch, Completion, Group, Trajectory

_NONE = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork:
    """The engine's passes: rows of known text, rows of sampled tokens, draft rows verified in vain, and what
    ran once more after a preemption."""

    prefill: Work = _NONE
    decode: Work = _NONE
    refused: Work = _NONE
    recomputed: Work = _NONE

    def __add__(self, other: RolloutWork) -> RolloutWork:
        return RolloutWork(
            prefill=self.prefill + other.prefill,
            decode=self.decode + other.decode,
            refused=self.refused + other.refused,
            recomputed=self.recomputed + other.recomputed,
        )

    @property
    def total(self) -> Work:
        return self.prefill + self.decode + self.refused + self.recomputed


def rollout_work(groups: Iterable[Group]) -> RolloutWork:
    """The work of all episodes of ``groups``."""
    trajectories = (trajectory for group in groups for trajectory in group.trajectories)
    return sum(map(trajectory_work, trajectories), RolloutWork())


def trajectory_work(trajectory: Trajectory) -> RolloutWork:
    """The work of one episode, turn by turn: tokens that a turn found in the prefix tree, from siblings or
    from the turn before, were not computed again."""
    work, history = RolloutWork(), 0
    for turn in trajectory.turns:
        history = (0 if turn.new_row else history) + len(turn.context)
        work += completion_work(history, turn.completion)
        history += len(turn.completion.tokens)
    return work


def completion_work(prompt: int, answer: Completion) -> RolloutWork:
    """The work of an answer to ``prompt`` tokens.

    The last row of the prompt gives the logits of the first token, and the last token is never a row.
    Injected tokens are known text. A pass runs one row besides its drafts, so rows from which no sampled
    token came were in vain: the refused drafts, and the last token where it was a draft itself. The positions
    of these rows are not recorded: each counts as many pairs as a row of the answer on average.
    """
    length = len(answer.tokens)
    sampled = length - answer.num_injected
    vain = max(
        answer.drafted - answer.accepted, answer.passes + answer.drafted - sampled if answer.passes else 0
    )
    refused = Work(vain, vain * (prompt + (length + 1) // 2), vain)
    return _answer_work(prompt, answer.cached_tokens, answer) + RolloutWork(
        refused=refused, recomputed=_recomputed(answer)
    )


def _answer_work(prompt: int, cached: int, answer: Completion) -> RolloutWork:
    """Prefill and decode of the answer to ``prompt`` tokens, of which ``cached`` were there."""
    length = len(answer.tokens)
    injected = np.zeros(length, bool) if answer.injected is None else answer.injected
    known = injected[:-1]
    sees = prompt + 1 + np.arange(max(0, length - 1))  # of the row of token t
    # the row before token t, that gave its logits, is known text where it is the prompt's last or injected
    requested = int((~injected & np.concatenate(([True], known))).sum()) if length else 0
    read = Work(prompt - cached, _causal(prompt) - _causal(cached), requested)
    prefill = read + Work(int(known.sum()), int(sees[known].sum()), 0)
    decode = Work(int((~known).sum()), int(sees[~known].sum()), length - answer.num_injected - requested)
    return RolloutWork(prefill=prefill, decode=decode)


def needed_work(groups: Iterable[Group]) -> Work:
    """The work of ``groups`` on an engine that does nothing twice and nothing in vain: a prompt is prefilled
    once for its group, except for the last token, from which every answer begins, and a later turn prefills
    new tokens only. It follows from the tokens alone, so every engine, cache and drafter has the same."""
    total = _NONE
    for group in groups:
        begun: np.ndarray | None = None  # the first context of an earlier answer
        for turns in (trajectory.turns for trajectory in group.trajectories if trajectory.turns):
            there = 0 if begun is None else _shared(begun, turns[0].context[:-1])
            begun, history = (turns[0].context if begun is None else begun), 0
            for turn in turns:
                if turn.new_row:
                    there = history = 0
                history += len(turn.context)
                work = _answer_work(history, there, turn.completion)
                total += work.prefill + work.decode
                length = len(turn.completion.tokens)
                there, history = history + max(0, length - 1), history + length
    return total


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    return int(np.append(a[:size] == b[:size], False).argmin())


def _recomputed(answer: Completion) -> Work:
    spans = [] if answer.recomputed is None else answer.recomputed.tolist()
    rows, pairs = (sum(of(end) - of(start) for start, end in spans) for of in (int, _causal))
    return Work(rows, pairs, 0)


def batch_work(batch: Batch) -> Work:
    """The work of one forward of ``batch``."""
    return sum((Work.packed(part.segments, len(part.rows)) for part in batch.microbatches), _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of a training step: ``train`` with all that it needs, ``measure`` for figures only."""

    train: float
    measure: float


def step_flops(flops: FlopModel, batch: Work, passes: Mapping[str, float]) -> StepFlops:
    """The FLOPs of one training step on ``batch``, with the extra passes that the trainer's metrics count."""
    forward, backward = flops.forward(batch), flops.backward(batch)
    repeated, extra, measure = (
        passes.get(f"passes/{name}", 0.0) for name in ("repeated", "extra", "measure")
    )
    return StepFlops(train=(1 + repeated) * (forward + backward) + extra * forward, measure=measure * forward)


def _causal(rows: int) -> int:
    """Pairs of a sequence that sees itself; below 0 for -rows that were run once more than needed."""
    return rows * (abs(rows) + 1) // 2
