"""Seconds of an RL step by phase and term: a roofline of every part, with an efficiency where it is known.

    products, experts, head   FLOPs of ``model.flops`` over the peak of the dtype, or the weights' bytes over
                              the memory's bandwidth, whichever is longer, of the parts that a rank keeps
    messages                  ``plan.comm``'s bytes over the link that a group of ranks shares, and a latency
    bubble                    the way through the stages that other microbatches do not fill
    decode                    every step reads weights, caches of the sequences still running, and adapters;
                              as many steps as the longest answers take (``plan.sampling``)

Nothing overlaps but what our code overlaps: messages wait for products and products for messages (exposed
seconds add up); a pipeline's stages work side by side; with a lag, trainer and sampler on GPUs of their own
do. A straggling expert rank holds up the others in every layer, so expert products and exchanges are
multiplied by max over mean load. Microbatches are taken to be alike, as packing makes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ostinato.apps.plan.engines import as_kept
from ostinato.apps.plan.problem import Arrangement, Base, Phase, Placement, Problem, Setup, Times
from ostinato.apps.plan.roofline import Efficiency
from ostinato.apps.plan.sampling import rollout_seconds
from ostinato.apps.plan.training import local_bytes, train_seconds
from ostinato.apps.plan.training import trained_values as trained_of
from ostinato.parallel.layout import Layout

# Relative standard deviations of what a term depends on and that have not been measured.
SPREAD: Mapping[str, float] = MappingProxyType(
    {"train": 0.20, "logprobs": 0.20, "rollout": 0.25, "refit": 0.5, "switch": 0.4}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A ``problem.Clock``. ``factors`` multiply the seconds of a phase: those that ``plan.fit`` found."""

    efficiency: Efficiency = field(default_factory=Efficiency)
    factors: Mapping[str, float] = field(default_factory=dict)

    def phase(self, problem: Problem, phase: Phase, setup: Setup) -> Mapping[str, float]:
        """Exposed seconds of one phase of one RL step by term; empty where the phase has nothing to do (our
        trainer is its own old policy in the first of its optimizer steps: one update needs no forward ahead).
        """
        if phase == Phase.ROLLOUT:
            terms = rollout_seconds(problem, setup, self.efficiency)
        else:
            terms = train_seconds(problem, setup, self.efficiency, backward=phase == Phase.TRAIN)
        return self._fitted(phase, terms)

    def step(self, problem: Problem, arrangement: Arrangement) -> Times:
        """All of an RL step."""
        terms = {phase.value: self.phase(problem, phase, arrangement.setup(phase)) for phase in Phase}
        terms["refit"] = self._fitted("refit", refit_seconds(problem, arrangement, self.efficiency))
        terms["switch"] = self._fitted("switch", switch_seconds(problem, arrangement, self.efficiency))
        sums = {name: sum(parts.values()) for name, parts in terms.items()}
        overlapped = 0.0
        if arrangement.placement == Placement.APART and arrangement.lag > 0:
            overlapped = min(sums["rollout"], sums["train"] + sums["logprobs"])
        whole = sum(sums.values()) or 1.0
        spread = math.sqrt(sum((SPREAD.get(name, 0.3) * s) ** 2 for name, s in sums.items())) / whole
        return Times(terms=terms, low=1 / (1 + spread), high=1 + spread, overlapped=overlapped)

    def _fitted(self, phase: str, terms: Mapping[str, float]) -> dict[str, float]:
        factor = self.factors.get(phase, 1.0)
        return {term: s * factor for term, s in terms.items() if s}


def refit_bytes(problem: Problem, arrangement: Arrangement) -> float:
    """Bytes that a publish moves to every replica of the sampler together: the adapters in what the forward
    computes in, whole and logical; of full-parameter training the weights. 0 where both are the same tensors.
    """
    values = trained_of(problem.config, problem.adapter)
    if problem.adapter is not None:
        return values * problem.precision.compute.num_bytes
    same = arrangement.train.layout == arrangement.rollout.layout and arrangement.base == Base.SHARED
    colocated = arrangement.placement == Placement.COLOCATED
    return 0.0 if same and colocated else values * problem.precision.sampler.num_bytes


def refit_seconds(problem: Problem, arrangement: Arrangement, efficiency: Efficiency) -> dict[str, float]:
    """Gather and broadcast. Adapters come together at the first rank (their tensors are logical: any sampler
    layout can cut them) and go out down a chain; all weights go from every rank to every rank at once."""
    moved, cluster = refit_bytes(problem, arrangement), problem.cluster
    if not moved:
        return {}
    nodes = -(-arrangement.num_gpus // cluster.per_node)
    pace = (cluster.gpu.nic if nodes > 1 else cluster.gpu.link) * efficiency.network
    if problem.adapter is not None:
        alone = arrangement.train.layout.world == 1
        return {"gather": 0.0 if alone else moved / pace, "broadcast": moved / pace}
    share = local_bytes(problem, _sampling(problem, arrangement), problem.precision.sampler)
    return {"reshard": share / pace}


def _sampling(problem: Problem, arrangement: Arrangement) -> Layout:
    """By which the sampler's weights lie."""
    return as_kept(arrangement.rollout.layout)


def switch_seconds(problem: Problem, arrangement: Arrangement, efficiency: Efficiency) -> dict[str, float]:
    """Between host and devices, once around a step. Frozen weights are only fetched, never put back."""
    pcie, frozen = problem.cluster.gpu.pcie * efficiency.pcie, problem.adapter is not None
    both = 1.0 if frozen else 2.0
    found = {}
    if arrangement.placement == Placement.COLOCATED and arrangement.base == Base.SWAPPED:
        own = local_bytes(problem, arrangement.train.layout, problem.precision.base)
        theirs = local_bytes(problem, _sampling(problem, arrangement), problem.precision.sampler)
        found["base"] = (both * own + theirs) / pcie
    return found
