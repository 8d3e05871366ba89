"""The trainer's passes over the ranks of a layout.

    data       microbatch n of a minibatch goes to data rank n modulo d; if their number is no multiple of d,
               the other ranks run only padding where ranks of several microbatches exchange rows or weights
    context,   rows of a microbatch, with padding to a multiple of c t: the context slice first, within it
    tensor     the tensor slice; every rank of the last stage has the log-probabilities of all rows, and the
               same loss
    pipeline   ``parallel.stages``

The scores of a microbatch are then sent to all ranks (``_gather_values``), so that the trainer decides the
same on all of them. Gradients are left as partial sums (``parallel.leaves``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.algo.logprobs import Vocabulary, chunked_logprobs, linear_logprobs
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.ops import Ops
from ostinato.model.packed import PackedAttention
from ostinato.parallel.chunks import Rows, decoder_chunks
from ostinato.parallel.collectives import Collectives, Mesh, all_gather_ragged
from ostinato.parallel.layout import Layout
from ostinato.parallel.rows import Ulysses
from ostinato.parallel.stages import Forward, Stages
from ostinato.train.gate import count_rows
from ostinato.train.inputs import Inputs
from ostinato.train.passes import (
    Objective,
    Outcome,
    ScoreOptions,
    Scores,
    choose_head_products,
    watch_routers,
)
from ostinato.types import NO_EXPERT, Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """The part of a microbatch that one rank computes: T rows with padding, of which n are this rank's own.

    Seven rows over c2 t2 (P is padding), and the part of rank (context 1, tensor 0)::

        row        0 1 2 3 4 5 6 P
        context    0 0 0 0 1 1 1 1     rows: tokens and positions of rows 4 to 7
        tensor     0 0 1 1 0 0 1 1     own: rows 4 and 5
    """

    source: Inputs | None  # None: all rows are padding
    index: int  # of the microbatch among those of the call
    rows: Rows  # of the context slice; the routes of own rows
    own: range  # of the T rows, those of this rank
    real: int  # how many of the own rows, from the first, are not padding
    carried: Tensor | None  # [n, moe_layers, top_k] int16, NO_EXPERT where there is padding
    predictors: Tensor  # [m] int64: the rows of the context slice whose hidden states predict targets
    places: Tensor  # [m] int64: the indices of these targets among the R of the microbatch


def slice_part(part: Inputs, index: int, mesh: Mesh, links: Collectives) -> Slice:
    """The part that this rank computes of a microbatch of its data rank."""
    length = len(part.tokens)
    total = length + count_padding(length, mesh.layout)
    context, own = _split_rows(total, mesh)
    segments = part.segments
    if total > length:
        segments = (*segments, Segment(start=length, stop=total))
    is_local = (part.rows >= context.start) & (part.rows < context.stop)

    def routes(ids: Tensor | None) -> Tensor | None:
        return None if ids is None else _pad_rows(ids, own, NO_EXPERT)

    rows = Rows(
        tokens=_pad_rows(part.tokens, context, 0),
        positions=_pad_rows(part.positions, context, 0),
        attend=Ulysses(PackedAttention(segments), links),
        routing=routes(part.routing),
    )
    return Slice(
        source=part,
        index=index,
        rows=rows,
        own=own,
        real=max(0, min(length, own.stop) - own.start),
        carried=routes(part.carried),
        predictors=part.rows[is_local] - context.start,
        places=is_local.nonzero().squeeze(1),
    )


def make_idle_slice(mesh: Mesh, links: Collectives) -> Slice:
    """A slice of padding only: a rank without a microbatch runs it to join the collectives of the others."""
    total = mesh.layout.row_shards
    context, own = _split_rows(total, mesh)
    zeros = torch.zeros(len(context), dtype=torch.int64, device=mesh.device)
    attend = Ulysses(PackedAttention((Segment(start=0, stop=total),)), links)
    no_rows = zeros[:0]
    return Slice(
        source=None,
        index=-1,
        rows=Rows(tokens=zeros, positions=zeros, attend=attend),
        own=own,
        real=0,
        carried=None,
        predictors=no_rows,
        places=no_rows,
    )


def count_padding(rows: int, layout: Layout) -> int:
    """Number of padding rows with which a microbatch of ``rows`` rows is cut evenly."""
    return -rows % layout.row_shards


def _split_rows(total: int, mesh: Mesh) -> tuple[range, range]:
    """This rank's (context slice, own rows) as ranges of the ``total`` padded rows."""
    layout, coords = mesh.layout, mesh.coords
    context_rows, own_rows = total // layout.context, total // layout.row_shards
    start = coords.context * context_rows
    own_start = start + coords.tensor * own_rows
    return range(start, start + context_rows), range(own_start, own_start + own_rows)


def _pad_rows(x: Tensor, rows: range, fill: int) -> Tensor:
    """Rows ``rows`` of x; those past its end are filled with ``fill``."""
    present_rows = x[rows.start : rows.stop]
    num_missing = len(rows) - len(present_rows)
    return (
        torch.cat((present_rows, x.new_full((num_missing, *x.shape[1:]), fill)))
        if num_missing
        else present_rows
    )


class ShardedPasses:
    """``train.passes.Passes`` of one rank.

    ``decoders``: the chunks of the model that this rank keeps, in order of depth, with ``adapters`` of all of
    them, and of the ``reference`` policy, None for the base; ``ops``: of a rank, with gradients
    (``parallel.rows.sequence_ops``). ``entropy_grad``: the objective uses the gradient of the entropy.
    """

    def __init__(
        self,
        mesh: Mesh,
        links: Collectives,
        decoders: Sequence[Decoder],
        adapters: Adapters | None,
        *,
        reference: Adapters | None = None,
        ops: Ops,
        temperature: float,
        recompute: bool,
        entropy_grad: bool,
    ) -> None:
        self._mesh, self._links, self._decoders, self._ops = mesh, links, decoders, ops
        self._adapters, self._reference = adapters, reference
        self._temperature, self._recompute, self._entropy_grad = temperature, recompute, entropy_grad
        self._layout, self._coords = mesh.layout, mesh.coords
        config = decoders[0].config
        self._config, self._moe_layers = config, config.moe.layers if config.moe else ()
        self._stages: Stages[Slice] = Stages.at(
            mesh, links, shape=lambda shard: (len(shard.own), config.hidden_size), dtype=decoders[0].dtype
        )
        self._num_passes = 0
        self._num_idle = self._num_padding = 0

    @property
    def progress(self) -> float:
        """Number of passes over microbatches and of collectives, which also grows while a checkpoint is
        gathered."""
        return float(self._num_passes + self._links.progress)

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        """See ``Passes.train``; outcomes are computed from gathered scores, on every rank."""
        shards = self._shard_microbatches(parts)
        scores_by_index: dict[int, Tensor] = {}

        def loss(one: Slice, hidden: Tensor, _: Any) -> Tensor:
            logprobs, entropy = self._score_head(hidden, one, want_entropy=True)
            if one.source is None:
                return logprobs.sum()  # of nothing, but other ranks wait for its backward
            scores_by_index[one.index] = torch.stack((logprobs, entropy)).detach()
            return objective(one.source, Scores(logprobs=logprobs, entropy=entropy)).loss * scale

        extras = self._stages.train(shards, self._build_forward(ScoreOptions()), loss)
        pairs = self._gather_values(
            [(2, len(part.rows)) for part in parts], scores_by_index if self._is_sender else {}
        )
        counts = self._gather_counts(parts, shards, extras)
        outcomes = []
        for part, (logprobs, entropy), part_counts in zip(parts, pairs, counts, strict=True):
            entropy.requires_grad_()  # an objective that uses its gradient requires one
            scores = Scores(logprobs=logprobs, entropy=entropy, counts=part_counts)
            outcomes.append(objective(part, scores).detach())
        return outcomes

    def score(self, parts: Sequence[Inputs], options: ScoreOptions) -> list[Scores]:
        """See ``Passes.score``."""
        shards = self._shard_microbatches(parts)
        logprobs_by_index: dict[int, Tensor] = {}

        @torch.no_grad()
        def score_slice(one: Slice, hidden: Tensor, _: Any) -> None:
            if options.logprobs and one.source is not None:
                logprobs_by_index[one.index] = self._score_head(hidden.detach(), one, want_entropy=False)[0]

        with torch.set_grad_enabled(options.as_trained):
            extras = self._stages.score(shards, self._build_forward(options), score_slice)
        logprobs = native = margins = [None] * len(parts)
        if options.logprobs:
            logprobs = self._gather_values(
                [(len(part.rows),) for part in parts], logprobs_by_index if self._is_sender else {}
            )
        if self._moe_layers and options.native:
            native = self._gather_choices(parts, shards, extras)
        if self._moe_layers and options.margins:
            # [T, L_moe] of every microbatch
            margins = self._gather_rows(parts, shards, extras, 1, (len(self._moe_layers),), self._score_dtype)
        columns = zip(logprobs, self._gather_counts(parts, shards, extras), native, margins, strict=True)
        return [Scores(logprobs=a, counts=b, native=c, margins=d) for a, b, c, d in columns]

    def metrics(self) -> dict[str, float]:
        """The traffic that this rank sent, and the idle passes and padding rows of all data ranks, since the
        last call."""
        metrics = self._links.traffic.take().metrics()
        metrics |= {
            "parallel/idle_passes": float(self._num_idle),
            "parallel/padding_rows": float(self._num_padding),
        }
        self._num_idle = self._num_padding = 0
        return metrics

    def _shard_microbatches(self, parts: Sequence[Inputs]) -> list[Slice]:
        """Cut this rank's slices of its microbatches, in order, with idle slices where other ranks have more,
        and count the padding and the idle passes of all data ranks."""
        mesh, layout = self._mesh, self._mesh.layout
        shards = [
            slice_part(part, index, mesh, self._links)
            for index, part in enumerate(parts)
            if index % layout.data == mesh.coords.data
        ]
        self._num_padding += sum(count_padding(len(part.tokens), layout) for part in parts)
        if layout.couples_microbatches:
            num_idle = -len(parts) % layout.data
            self._num_idle += num_idle
            self._num_padding += num_idle * layout.row_shards
            shards += [make_idle_slice(mesh, self._links)] * (-(-len(parts) // layout.data) - len(shards))
        return shards

    def _build_forward(self, options: ScoreOptions) -> Forward[Slice]:
        """Build the forward for ``parallel.stages``: besides the stream, each chunk returns its own choice of
        experts for own rows, and the margins."""
        margins_by_layer: list[Tensor] = []
        run = decoder_chunks(
            dict(zip(self._stages.chunks, self._decoders, strict=True)),
            self._reference if options.reference else self._adapters,
            _get_rows,
            ops=watch_routers(self._ops, margins_by_layer) if options.margins else self._ops,
            recompute=self._recompute,
        )

        def forward(chunk: int, one: Slice, x: Tensor | None, /) -> tuple[Tensor, Any]:
            self._num_passes += 1
            out, native = run(chunk, one, x)
            margins = torch.stack(margins_by_layer, dim=1) if margins_by_layer else None
            margins_by_layer.clear()
            return out, (native, margins)

        return forward

    def _index_layers(self, local: int) -> list[int]:
        """Indices of a chunk's MoE layers among those of the model."""
        chunk_layers = self._decoders[local].share.layers
        return [index for index, layer in enumerate(self._moe_layers) if layer in chunk_layers]

    def _score_head(self, hidden: Tensor, one: Slice, *, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy, each [R], of all targets of a microbatch, from own hidden states.

        Each tensor rank has a part of the vocabulary, each context rank its rows; the result is whole on all
        of them. Gradients flow to a context rank's own rows, and through a tensor rank's own logits.
        """
        assert one.source is not None or not len(one.predictors)
        decoder = self._decoders[-1]
        # rows may repeat, see ``LocalPasses.forward``: indexing would not sum their gradients in order
        hidden = self._links.all_gather(hidden, "t").index_select(0, one.predictors)
        if one.source is None:
            empty = hidden.sum(-1)
            return empty, empty.detach()
        if len(one.predictors):
            scores = torch.stack(self._score_targets(decoder, hidden, one, want_entropy), dim=1)
        else:  # rows of other slices predict all targets, but other ranks wait for this part of the graph
            scores = hidden.sum(-1, keepdim=True).to(self._score_dtype).expand(-1, 2)
        if self._layout.context > 1:
            whole = scores.new_zeros(len(one.source.rows), 2).index_copy(0, one.places, scores)
            scores = self._links.all_reduce(whole, "c")
        return scores[:, 0], scores[:, 1]

    def _score_targets(
        self, decoder: Decoder, hidden: Tensor, one: Slice, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropy), each [m], of the targets whose hidden states [m, D] are here."""
        assert one.source is not None
        support = one.source.source.support
        head, targets = decoder.head_weight, one.source.targets[one.places]
        options: dict[str, Any] = {
            "support": None if support is None else support.take(one.places.cpu().numpy()),
            "temperature": self._temperature,
            "want_entropy": want_entropy,
            "vocabulary": self._make_vocabulary(head),
        }
        if head.requires_grad:
            return chunked_logprobs(hidden, targets, decoder.logits, **options)
        options["entropy_grad"] = want_entropy and self._entropy_grad
        options["matmul_nt"], options["matmul_nn"] = choose_head_products(decoder, self._ops)
        return linear_logprobs(hidden, head, targets, **options)

    def _make_vocabulary(self, head: Tensor) -> Vocabulary | None:
        """This rank's part of the vocabulary and its reductions; None where it is whole."""
        if self._layout.tensor == 1:
            return None
        return Vocabulary(
            start=self._coords.tensor * len(head),
            size=len(head),
            sum=lambda x: self._links.sum_(x.contiguous(), "t"),
            max=lambda x: self._links.max_(x.contiguous(), "t"),
        )

    @property
    def _score_dtype(self) -> torch.dtype:
        """The dtype of log-probabilities."""
        return torch.promote_types(self._decoders[0].dtype, torch.float32)

    @property
    def _is_sender(self) -> bool:
        """Whether this rank sends the log-probabilities of its microbatches, which several ranks have."""
        return self._stages.is_last and self._coords.context == 0 and self._coords.tensor == 0

    def _gather_values(self, shapes: Sequence[Sequence[int]], own: Mapping[int, Tensor]) -> list[Any]:
        device = self._decoders[0].device
        return all_gather_ragged(self._links, shapes, own, dtype=self._score_dtype, device=device)

    def _gather_counts(
        self, parts: Sequence[Inputs], shards: Sequence[Slice], extras: Any
    ) -> list[Tensor | None]:
        """``gate.count_rows`` [3, T] of each microbatch over all layers: the sum of what each rank counts for
        its own rows; None for those without routes."""
        if not self._moe_layers or all(part.carried is None for part in parts):
            return [None] * len(parts)
        shapes = [(3, len(part.tokens) if part.carried is not None else 0) for part in parts]
        local_counts = {}
        for position, shard in enumerate(shards):
            if shard.source is None or shard.carried is None:
                continue
            shard_counts = shard.places.new_zeros(shapes[shard.index])
            for chunk in range(len(self._decoders)):
                native = extras[chunk][position][0]
                if native is not None:
                    rows = slice(shard.own.start, shard.own.start + shard.real)
                    carried = shard.carried[: shard.real, self._index_layers(chunk)]
                    shard_counts[:, rows] += count_rows(native[: shard.real], carried)
            local_counts[shard.index] = shard_counts
        device = self._decoders[0].device
        gathered = all_gather_ragged(self._links, shapes, local_counts, dtype=torch.int64, device=device)
        return [
            None if part.carried is None else counts for part, counts in zip(parts, gathered, strict=True)
        ]

    def _gather_choices(self, parts: Sequence[Inputs], shards: Sequence[Slice], extras: Any) -> list[Tensor]:
        """The trainer's own choice of experts [T, L_moe, K] int16 in every microbatch."""
        assert self._config.moe is not None
        widths = (len(self._moe_layers), self._config.moe.top_k)
        choices = self._gather_rows(
            parts, shards, extras, 0, widths, torch.int32
        )  # gloo has no sums of 16 bits
        return [ids.to(torch.int16) for ids in choices]

    def _gather_rows(
        self,
        parts: Sequence[Inputs],
        shards: Sequence[Slice],
        extras: Any,
        entry: int,
        widths: tuple[int, ...],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Gather [T, L_moe, *widths] of every microbatch from all ranks. ``entry``: the index of the values
        in the extras that each chunk's forward returned for own rows and layers."""
        device = self._decoders[0].device
        shapes = [(len(part.tokens), *widths) for part in parts]
        local_values = {}
        for position, shard in enumerate(shards):
            if shard.source is None:
                continue
            values = torch.zeros(shapes[shard.index], dtype=dtype, device=device)
            for chunk in range(len(self._decoders)):
                chunk_values = extras[chunk][position][entry]
                if chunk_values is not None:
                    rows = slice(shard.own.start, shard.own.start + shard.real)
                    values[rows, self._index_layers(chunk)] = chunk_values[: shard.real].to(dtype)
            local_values[shard.index] = values
        return all_gather_ragged(self._links, shapes, local_values, dtype=dtype, device=device)


def _get_rows(one: Slice) -> Rows:
    return one.rows
