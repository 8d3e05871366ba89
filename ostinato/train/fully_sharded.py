"""The trainer's passes over data ranks that each keep a part of one model (``hf.fsdp``).

Microbatches go round: of n ranks each runs the layers of one, then all compute the head's part of every row,
and so the same scores and the same losses. A rank without a microbatch runs a row of padding, as the others
wait for its part of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.algo.algorithms import Algorithm
from ostinato.algo.logprobs import Vocabulary
from ostinato.config import TrainerSection
from ostinato.model.base import Base
from ostinato.model.lora import Adapters, Factors
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.parallel.collectives import Collectives
from ostinato.train.inputs import Inputs
from ostinato.train.leaves import Leaves
from ostinato.train.local import LocalPasses
from ostinato.train.passes import Backend, Objective, Outcome, ScoreOptions, Scores, copy_reference
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Segment, Support

AXIS = "f"


class FullyShardedPasses:
    """``train.passes.Passes`` of one rank, over the ``LocalPasses`` of its part of the model."""

    def __init__(
        self,
        links: Collectives,
        decoder: Base,
        adapters: Adapters,
        *,
        vocabulary: range,
        reference: Adapters | None,
        **options: Any,
    ) -> None:
        self._links, self._decoder, self._adapters, self._reference = links, decoder, adapters, reference
        own_part = Vocabulary(
            start=vocabulary.start,
            size=len(vocabulary),
            sum=lambda x: links.sum_(x.contiguous(), AXIS),
            max=lambda x: links.max_(x.contiguous(), AXIS),
        )
        self._local = LocalPasses(decoder, adapters, splits=False, vocabulary=own_part, **options)
        self.progress = 0.0

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        """See ``Passes.train``; gradients of the adapters are sums over all ranks."""
        factors = Factors(self._adapters, self._decoder.dtype)
        outcomes = []
        for joined, members in self._go_round(parts):
            hidden = self._forward(members, factors.prepared)
            scores = self._local.logprobs(hidden, joined, want_entropy=True)
            columns = zip(
                *(values.split([len(part.rows) for part in members]) for values in scores), strict=True
            )
            results = [
                objective(part, Scores(logprobs=logprobs, entropy=entropy))
                for part, (logprobs, entropy) in zip(members, columns, strict=True)
            ]
            (torch.stack([result.loss for result in results]).sum() * scale).backward()
            factors.add()
            outcomes += [result.detach() for result in results]
        factors.backward()
        return outcomes

    def score(self, parts: Sequence[Inputs], options: ScoreOptions) -> list[Scores]:
        """See ``Passes.score``; a model over ranks has no routers."""
        adapters = self._reference if options.reference else self._adapters
        results = []
        with torch.set_grad_enabled(options.as_trained):
            prepared = adapters.prepare(self._decoder.dtype) if adapters else None
            for joined, members in self._go_round(parts):
                hidden = self._forward(members, prepared).detach()
                if not options.logprobs:
                    results += [Scores(logprobs=None)] * len(members)
                    continue
                with torch.no_grad():
                    logprobs, _ = self._local.logprobs(hidden, joined, want_entropy=False)
                results += [
                    Scores(logprobs=own) for own in logprobs.split([len(part.rows) for part in members])
                ]
        return results

    def metrics(self) -> dict[str, float]:
        """The traffic of rows and factors since the last call, without that of gathered layers."""
        return self._links.traffic.take().metrics()

    def _go_round(self, parts: Sequence[Inputs]) -> Iterator[tuple[Inputs, Sequence[Inputs]]]:
        """Yield (their targets as one part, the microbatches), at most one for each rank."""
        ranks = self._links.size(AXIS)
        for start in range(0, len(parts), ranks):
            members = parts[start : start + ranks]
            self.progress += 1
            yield _join_targets(members), members

    def _forward(self, members: Sequence[Inputs], prepared: Any) -> Tensor:
        """Hidden states [R, D] of the targets of all ``members``, of which this rank computes its own."""
        place = self._links.place(AXIS)
        part = members[place] if place < len(members) else _make_idle(members[0])
        hidden, _ = self._local.forward(part, prepared)
        longest = max(len(member.rows) for member in members)
        padded = F.pad(hidden, (0, 0, 0, longest - len(hidden)))
        every = self._links.all_gather(padded, AXIS)
        chosen = [every[rank * longest :][: len(member.rows)] for rank, member in enumerate(members)]
        return torch.cat(chosen)


def _make_idle(part: Inputs) -> Inputs:
    """A part of one token and no targets."""
    zero = part.tokens.new_zeros(1)
    segments = (Segment(start=0, stop=1),)
    return replace(part, tokens=zero, positions=zero, segments=segments, rows=zero[:0])


def _join_targets(members: Sequence[Inputs]) -> Inputs:
    """The first part with the targets and supports of all, one after another."""
    supports = [member.source.support for member in members]
    support = None
    if any(own is not None for own in supports):
        support = Support.concatenate(
            [own or Support.whole(len(member.rows)) for own, member in zip(supports, members, strict=True)]
        )
    targets = torch.cat([member.targets for member in members])
    return replace(members[0], source=replace(members[0].source, support=support), targets=targets)


def fully_sharded_trainer(
    links: Collectives,
    decoder: Any,
    adapters: Adapters,
    leaves: Leaves,
    algorithm: Algorithm,
    *,
    settings: TrainerSection,
    temperature: float = 1.0,
    ops: Ops = TORCH_OPS,
    **options: Any,
) -> PolicyTrainer:
    """The trainer of one rank, of ``hf.fsdp``'s ``ShardedModel``, ``PieceAdapters`` and ``PieceLeaves``; all
    ranks make theirs together, and the same calls from then on. ``options``: of ``PolicyTrainer``."""
    passes = FullyShardedPasses(
        links,
        decoder,
        adapters,
        vocabulary=decoder.vocabulary,
        reference=copy_reference(adapters, algorithm),
        ops=ops,
        temperature=temperature,
        recompute=settings.recompute,
        entropy_grad=algorithm.needs_entropy,
    )
    fingerprint = decoder.fingerprint()
    backend = Backend(passes=passes, leaves=leaves, fingerprint=lambda: fingerprint)
    return PolicyTrainer(
        decoder,
        adapters,
        algorithm,
        settings=settings,
        temperature=temperature,
        ops=ops,
        backend=backend,
        **options,
    )
