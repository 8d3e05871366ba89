"""Group -> Samples: the turns of each row of a trajectory merged into a sequence, token in, token out.

Pure. Nothing is re-tokenised, re-computed or repaired: the tokens and records of the engine are trained on as
they are. Tokens that were put into an answer and not sampled (``Completion.injected``) are context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.types import NO_EXPERT, Group, Sample, Support, Trajectory, Turn


def make_samples(group: Group, group_index: int, advantages: np.ndarray) -> list[Sample]:
    """Return a Sample for each row of each member with a finite advantage ([G], NaN = not trained on), in
    order. Raises ValueError if such a member has no turns.

    All rows of a member have its advantage. The uid is "prompt uid#member", with ".row" appended for further
    rows. ``experts`` is None if any token but the last lacks its route.
    """
    return [
        _merge_turns(turns, trajectory, float(advantage), group_index, member, uid + f".{row}" * (row > 0))
        for member, (trajectory, advantage) in enumerate(zip(group.trajectories, advantages, strict=True))
        if np.isfinite(advantage)
        for uid in (f"{group.prompt.uid}#{member}",)
        for row, turns in enumerate(trajectory.rows or [()])
    ]


def _merge_turns(
    turns: tuple[Turn, ...], trajectory: Trajectory, advantage: float, group_index: int, member: int, uid: str
) -> Sample:
    """Make a Sample of the turns of a row. Raises ValueError without turns."""
    if not turns:
        raise ValueError(f"sample {uid} has an advantage but no turns; give it NaN")
    tokens, masks, logprobs, versions = [], [], [], []
    for turn in turns:
        answer, context_len = turn.completion, len(turn.context)
        tokens += [turn.context, answer.tokens]
        is_sampled = np.ones(len(answer.tokens), bool) if answer.injected is None else ~answer.injected
        masks += [np.zeros(context_len, bool), is_sampled]
        logprobs += [np.zeros(context_len, np.float32), answer.logprobs]
        versions += [np.full(context_len, -1, np.int32), answer.versions]
    loss_mask = np.concatenate(masks)
    return Sample(
        tokens=np.concatenate(tokens).astype(np.int32, copy=False),
        loss_mask=loss_mask,
        logprobs=np.concatenate(logprobs).astype(np.float32, copy=False),
        advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
        versions=np.concatenate(versions).astype(np.int32, copy=False),
        group=group_index,
        prompt_len=len(turns[0].context),
        uid=uid,
        member=member,
        experts=_merge_routes(turns),
        support=_merge_supports(turns),
    )


def _merge_supports(turns: Sequence[Turn]) -> Support | None:
    """Return the ids that each token of the merged sequence was drawn from; for context, and turns without a
    record, the whole vocabulary. None if no turn has a record."""
    if all(turn.completion.support is None for turn in turns):
        return None
    parts: list[Support] = []
    for turn in turns:
        answer = turn.completion
        support = Support.whole(len(answer.tokens)) if answer.support is None else answer.support
        parts += [Support.whole(len(turn.context)), support]
    return Support.concatenate(parts)


def _merge_routes(turns: Sequence[Turn]) -> np.ndarray | None:
    """Return routes [L, moe_layers, top_k] of the merged sequence, or None when a part was not recorded.

    A turn's ``prompt_experts`` cover its context from some row on. Turns may overlap, and where the later
    turn was computed again (an evicted cache, a policy published in between) they may differ. The earlier
    record is used: the row that predicts a trained token then has the route through which that token was
    sampled. The later turn's tokens were sampled with the later record before them, but they see those rows
    only through attention; their own rows are in no earlier record. The earlier record lacks the route of its
    last token, which became an input only when the episode went on: it is taken from the later turn.
    """
    records: list[np.ndarray] = []
    for turn in turns:
        prompt, answer = turn.completion.prompt_experts, turn.completion.experts
        if prompt is None or answer is None:
            return None
        records.append(np.concatenate([prompt, answer]))
    lengths = [len(turn.context) + len(turn.completion.tokens) for turn in turns]
    routes = np.full((sum(lengths), *records[0].shape[1:]), NO_EXPERT, records[0].dtype)
    for record, end in zip(records, np.cumsum(lengths).tolist(), strict=True):
        rows = routes[end - len(record) : end]
        np.copyto(rows, record, where=rows == NO_EXPERT)
    return None if (routes[:-1] == NO_EXPERT).any() else routes
