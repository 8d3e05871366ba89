"""Completions, episodes, groups and samples, made up for tests; what is not given is zeros or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ostinato.parallel.placement import place_contiguously
from ostinato.types import NO_EXPERT, Completion, Group, Prompt, Reward, Sample, Stop, Trajectory, Turn


def completion(tokens: Sequence[int] | np.ndarray | int, **changes: Any) -> Completion:
    """Of ``tokens``, or of as many zeros."""
    ids = np.zeros(tokens, np.int32) if isinstance(tokens, int) else np.array(tokens, np.int32)
    zeros = {"logprobs": np.zeros(len(ids), np.float32), "versions": np.zeros(len(ids), np.int32)}
    return Completion(**{"tokens": ids, **zeros, "stop": Stop.EOS, **changes})


def episode(
    answer: Completion, context: int = 2, reward: Reward | float | None = None, **changes: Any
) -> Trajectory:
    """One turn behind a context of zeros; it has a verdict unless it failed."""
    turn = Turn(context=np.zeros(context, np.int32), completion=answer)
    verdict = reward if isinstance(reward, Reward) else Reward(value=reward)
    verdict = None if answer.stop is Stop.ERROR else verdict
    return Trajectory(**{"turns": (turn,), "stop": answer.stop, "seed": (0,), "reward": verdict, **changes})


def group_of(*trajectories: Trajectory, uid: str = "p", step: int = 1) -> Group:
    return Group(prompt=Prompt(uid=uid, text=uid), trajectories=trajectories, step=step)


def sample_of(tokens: Sequence[int] | np.ndarray | int, prompt: int, **changes: Any) -> Sample:
    """Trained on, with advantage 1, is all behind the first ``prompt`` tokens, or what ``loss_mask`` says."""
    ids = np.zeros(tokens, np.int32) if isinstance(tokens, int) else np.array(tokens, np.int32)
    mask = changes.setdefault("loss_mask", np.arange(len(ids)) >= prompt)
    usual = {
        "logprobs": np.zeros(len(ids), np.float32),
        "advantages": mask.astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "group": 0,
    }
    return Sample(**{"tokens": ids, "prompt_len": prompt, **usual, **changes})


def drawn_routes(rng: np.random.Generator, moe: Any, rows: int) -> np.ndarray:
    """[rows, L_moe, K] as no router of ``moe`` (a ``MoEConfig``) would choose them."""
    order = rng.random((rows, len(moe.layers), moe.num_experts)).argsort(-1)
    return order[..., : moe.top_k].astype(np.int16)


def drawn(
    rng: np.random.Generator,
    vocab: int,
    prompt: int,
    answers: Sequence[int],
    *,
    moe: Any = None,
    group: int = 0,
    gap: slice = slice(0),
) -> list[Sample]:
    """Siblings behind ``prompt`` tokens, with answers of these lengths, of which ``gap`` was put in;
    routes of the prompt are those of all, the last row's are not known."""
    context = rng.integers(0, vocab, prompt)
    common = drawn_routes(rng, moe, prompt) if moe else np.empty(0)
    found = []
    for sibling, length in enumerate(answers):
        tokens = np.concatenate([context, rng.integers(0, vocab, length)])
        mask = np.arange(len(tokens)) >= prompt
        mask[prompt:][gap] = False
        more: dict[str, Any] = {"loss_mask": mask, "group": group, "uid": f"{group}#{sibling}"}
        if moe:
            more["experts"] = np.concatenate([common, drawn_routes(rng, moe, length)])
            more["experts"][-1] = NO_EXPERT
        logprobs = 0.1 * rng.standard_normal(len(tokens)) - np.log(vocab)
        more["logprobs"] = np.where(mask, logprobs, 0).astype("f4")
        more["advantages"] = np.where(mask, 1 + rng.standard_normal(), 0).astype("f4")
        found.append(sample_of(tokens, prompt, **more))
    return found


def scattered(layers: int, experts: int, ranks: int, seed: int = 0) -> np.ndarray:
    """[L, E]: equally many experts to each rank, drawn at random for every layer."""
    return np.random.default_rng(seed).permuted(place_contiguously(layers, experts, ranks), axis=1)
