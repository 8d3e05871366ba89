"""Group -> Samples: the turns of each trajectory merged into one sequence, token in, token out.

Pure. Nothing is re-tokenised, re-computed or repaired: what the engine returned is what is trained on.
"""

from __future__ import annotations

import numpy as np

from ostinato.types import NO_EXPERT, Group, Sample, Stop, Trajectory


def samples(group: Group, group_index: int, advantages: np.ndarray) -> list[Sample]:
    """One Sample for each member with a finite advantage ([G], NaN = not trained on), in member order.

    The uid is "prompt uid#member". ``experts`` is None where any token but the last lacks its route.
    """
    if len(advantages) != len(group.trajectories):
        raise ValueError(f"{len(advantages)} advantages for {len(group.trajectories)} trajectories")
    return [
        _sample(trajectory, float(advantage), group_index, f"{group.prompt.uid}#{member}")
        for member, (trajectory, advantage) in enumerate(zip(group.trajectories, advantages, strict=True))
        if np.isfinite(advantage)
    ]


def _sample(trajectory: Trajectory, advantage: float, group_index: int, uid: str) -> Sample:
    if not trajectory.turns:
        raise ValueError(f"sample {uid} has an advantage but no turns; give it NaN")
    tokens, masks, logprobs, versions = [], [], [], []
    for turn in trajectory.turns:
        said, context_len = turn.completion, len(turn.context)
        tokens += [turn.context, said.tokens]
        masks += [np.zeros(context_len, bool), np.ones(len(said.tokens), bool)]
        logprobs += [np.zeros(context_len, np.float32), said.logprobs]
        versions += [np.full(context_len, -1, np.int32), said.versions]
    loss_mask = np.concatenate(masks)
    return Sample(
        tokens=np.concatenate(tokens).astype(np.int32, copy=False),
        loss_mask=loss_mask,
        logprobs=np.concatenate(logprobs).astype(np.float32, copy=False),
        advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
        versions=np.concatenate(versions).astype(np.int32, copy=False),
        group=group_index,
        prompt_len=len(trajectory.turns[0].context),
        uid=uid,
        experts=_routes(trajectory),
        truncated=trajectory.stop is Stop.LENGTH,
    )


def _routes(trajectory: Trajectory) -> np.ndarray | None:
    """Routes [L, moe_layers, top_k] of the merged sequence, or None when a part was not recorded.

    A later turn's ``prompt_experts`` cover the earlier turns too. The earlier record wins, since its
    log-probabilities were sampled through it; the later one fills what it could not know, the route of its
    last token, which became an input only when the episode went on.
    """
    routes: np.ndarray | None = None
    for turn in trajectory.turns:
        prompt, said = turn.completion.prompt_experts, turn.completion.experts
        if prompt is None or said is None:
            return None
        merged = np.concatenate([prompt, said])
        if routes is not None:
            known = routes[..., :1] != NO_EXPERT
            merged[: len(routes)] = np.where(known, routes, merged[: len(routes)])
        routes = merged
    if routes is None or (routes[:-1] == NO_EXPERT).any():
        return None
    return routes
