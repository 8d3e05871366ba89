"""Bugs planted in recorded routes, each of which somebody has shipped: does the gate of a step see them?

A spoiler takes the routes of every sample, [L, layers, K] with NO_EXPERT behind the last input, and gives
wrong ones of the same shapes. They go through the product's own packing and ``PolicyTrainer.step``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ostinato.algo.algorithms import Algorithm
from ostinato.algo.routing import Cause, Misaligned
from ostinato.config import TrainerSection
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import NO_EXPERT, Batch, Microbatch, Sample

Say = Callable[[str], None]
Routes = Sequence[np.ndarray]
STILL = 1e-12  # a learning rate that leaves the policy, and with it the right routes, where they are


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trainers:
    """Makes trainers that differ by their policy alone."""

    decoder: Decoder
    kernels: Kernels | None
    rules: Algorithm
    temperature: float = 1.0

    @property
    def ops(self) -> Ops:
        return self.kernels.training if self.kernels else TORCH_OPS

    def make(self, policy: Adapters, *, replay: bool = True) -> PolicyTrainer:
        """One that starts from a copy of ``policy``, does not measure by itself, and hardly moves."""
        return PolicyTrainer(
            self.decoder,
            policy.detach_copy(),
            self.rules,
            settings=TrainerSection(lr=STILL, replay=replay),
            temperature=self.temperature,
            measure_every=0,
            ops=self.ops,
        )


# ---- spoilers


def shifted(routes: Routes, by: int) -> list[np.ndarray]:
    """Each token has the routes of the one ``by`` rows before it (after it, for a negative ``by``)."""

    def one(rows: np.ndarray) -> np.ndarray:
        known = rows[rows[:, 0, 0] != NO_EXPERT]
        source = np.clip(np.arange(len(known)) - by, 0, len(known) - 1)
        return _over(rows, known[source])

    return [one(rows) for rows in routes]


def reversed_layers(routes: Routes) -> list[np.ndarray]:
    return [rows[:, ::-1].copy() for rows in routes]


def rolled_layers(routes: Routes) -> list[np.ndarray]:
    return [np.roll(rows, 1, axis=1) for rows in routes]


def shuffled(routes: Routes, by: int) -> list[np.ndarray]:
    """Each sequence has the routes of the one ``by`` places on, cut or repeated to its own length."""
    known = [rows[rows[:, 0, 0] != NO_EXPERT] for rows in routes]
    others = [*known[by:], *known[:by]]
    return [
        _over(rows, np.resize(other, (len(own), *other.shape[1:])))
        for rows, own, other in zip(routes, known, others, strict=True)
    ]


def zero(routes: Routes) -> list[np.ndarray]:
    return [_over(rows, np.zeros_like(rows[rows[:, 0, 0] != NO_EXPERT])) for rows in routes]


def renumbered(routes: Routes, num_experts: int) -> list[np.ndarray]:
    """The experts under other numbers, as where two programs sort their names differently."""
    names = np.random.default_rng(0).permutation(num_experts)
    return [np.where(rows == NO_EXPERT, rows, names[rows]).astype(rows.dtype) for rows in routes]


def _over(rows: np.ndarray, known: np.ndarray) -> np.ndarray:
    """``rows`` with its known rows replaced by ``known``."""
    made = rows.copy()
    made[rows[:, 0, 0] != NO_EXPERT] = known
    return made


def bugs(num_experts: int, siblings: int) -> dict[str, tuple[Callable[[Routes], list[np.ndarray]], Cause]]:
    """The spoiler and the cause that a gate should name, by name. Other prompts have the routes of others."""
    return {
        "shifted by one, later": (lambda routes: shifted(routes, 1), Cause.SHIFTED),
        "shifted by one, earlier": (lambda routes: shifted(routes, -1), Cause.SHIFTED),
        "layers reversed": (reversed_layers, Cause.LAYERS),
        "layers rolled by one": (rolled_layers, Cause.LAYERS),
        "shuffled sequences": (lambda routes: shuffled(routes, siblings), Cause.SHUFFLED),
        "all zero": (zero, Cause.ZERO),
        "experts renumbered": (lambda routes: renumbered(routes, num_experts), Cause.UNRELATED),
    }


# ---- what becomes of them


def planted(
    trainers: Trainers,
    policy: Adapters,
    made: Sequence[Sample],
    pack: Callable[[Sequence[Sample]], Batch],
    say: Say,
) -> list[dict[str, Any]]:
    """Every bug in all sequences of a step, and in one of them alone: "bug", "where", and ``outcome``."""
    moe = trainers.decoder.config.moe
    assert moe is not None
    routes = [sample.experts for sample in made if sample.experts is not None]
    siblings = sum(sample.group == made[0].group for sample in made)
    only = siblings // 2  # not the first of its group, whose rows stand for the shared prompt
    rows = []
    for name, (spoil, cause) in bugs(moe.num_experts, siblings).items():
        spoilt = spoil(routes)
        everywhere = [replace(sample, experts=bad) for sample, bad in zip(made, spoilt, strict=True)]
        alone = [*made[:only], everywhere[only], *made[only + 1 :]]
        for where, chosen in (("all sequences", everywhere), (f"1 of {len(made)}", alone)):
            found = outcome(trainers, policy, pack(chosen))
            rows.append({"bug": name, "where": where, **found, "right": found["cause"] == cause})
            say(f"{name} in {where}: {'caught' if found['caught'] else 'not caught'} {found['cause']}")
    return rows


def outcome(trainers: Trainers, policy: Adapters, batch: Batch) -> dict[str, Any]:
    """Whether a step with the gate refuses ``batch`` and which cause it names; without the gate, the k3 that
    training would have had, None where the routes cannot be replayed at all, and how far they agree with the
    trainer's own."""
    caught, cause = False, ""
    try:
        trainers.make(policy).step(batch)
    except Misaligned as refusal:
        caught, cause = True, str(refusal.diagnosis.cause)
    measured = trainers.make(policy).measure(batch, floor=False)
    routers, replay = measured["routers"], measured["arms"].get("replay")
    return {
        "caught": caught,
        "cause": cause,
        "overlap": routers["overlap"],
        "lowest_sequence": routers["lowest_sequence"],
        "k3": None if replay is None else replay["k3"],
    }


def stale(
    trainers: Trainers, policies: Mapping[int, Adapters], now: int, batch: Batch, say: Say
) -> list[dict[str, Any]]:
    """Routes that another policy chose for the tokens of ``batch``, sampled and trained on by policy ``now``.

    Near by, such routes are nearly right, and are no worse a choice than the trainer's own. ``distance`` says
    how near: k3 of the other policy against the sampler, nats per token.
    """
    ages = [age for age in (0, 1, 2, 5, 10, 20, 50) if now - age in policies]
    chosen = {_aged(age): (trainers, policies[now - age]) for age in ages}
    for noise in (0.03, 0.1, 0.3, 1.0):
        chosen[f"router + {noise:g} of its own size in noise"] = (_noisy(trainers, noise), policies[now])
    rows = []
    for name, (others_trainers, policy) in chosen.items():
        old = rerouted(batch, others_trainers, policy)
        apart = others_trainers.make(policy).measure(batch, floor=False)["arms"]["native"]["k3"]
        rows.append({"policy": name, "distance": apart, **outcome(trainers, policies[now], old)})
        say(f"routes of {name}: overlap {rows[-1]['overlap']:.4f}, k3 {rows[-1]['k3']:.2e}")
    return rows


def _aged(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''} before" if steps else "the same policy"


def rerouted(batch: Batch, trainers: Trainers, policy: Adapters) -> Batch:
    """``batch`` with the routes that ``policy`` chooses for its tokens."""

    def one(microbatch: Microbatch) -> Microbatch:
        assert microbatch.experts is not None
        _, routing = trainers.decoder(
            torch.from_numpy(microbatch.tokens.astype(np.int64)),
            torch.from_numpy(microbatch.positions.astype(np.int64)),
            PackedAttention(microbatch.segments),
            adapters=policy,
            ops=trainers.ops,
        )
        assert routing is not None
        return replace(microbatch, experts=routing.numpy().astype(microbatch.experts.dtype))

    with torch.no_grad():
        return replace(batch, microbatches=tuple(one(microbatch) for microbatch in batch.microbatches))


@torch.no_grad()
def _noisy(trainers: Trainers, noise: float) -> Trainers:
    """With Gaussian noise on every router's matrix, ``noise`` times the size of its entries."""
    generator, noisy = torch.Generator().manual_seed(0), copy.deepcopy(trainers.decoder)
    for name, weight in noisy.named_parameters():
        if name.rpartition(".")[2] == "router":
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.float() + noise * weight.float().std() * drawn)
    return replace(trainers, decoder=noisy)
