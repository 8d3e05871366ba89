"""The trainer's passes over the ranks of a layout.

    data       microbatch n of a minibatch goes to data rank n modulo d; if their number is no multiple of d,
               the other ranks run only padding where ranks of several microbatches exchange rows or weights
    context,   rows of a microbatch, with padding to a multiple of c t: the context slice first, within it
    tensor     the tensor slice; every rank of the last stage has the log-probabilities of all rows, and the
               same loss
    pipeline   ``parallel.stages``

The scores of a microbatch are then sent to all ranks (``_everywhere``), so that the trainer decides the
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
from ostinato.train.gate import row_counts
from ostinato.train.inputs import Inputs
from ostinato.train.passes import Objective, Outcome, ScoreOptions, Scores, head_products, watching
from ostinato.types import NO_EXPERT, Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """The part of a microbatch that one rank computes. T rows with padding, n of them this rank's own.

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
    predictors: Tensor  # [m] int64: the rows of the context slice whose hidden states predict ...
    places: Tensor  # [m] int64: ... these of the R targets


def sliced(part: Inputs, index: int, mesh: Mesh, links: Collectives) -> Slice:
    """The share of this rank in a microbatch of its data rank."""
    length = len(part.tokens)
    total = length + padding(length, mesh.layout)
    context, own = _ranges(total, mesh)
    segments = part.segments
    if total > length:
        segments = (*segments, Segment(start=length, stop=total))
    here = (part.rows >= context.start) & (part.rows < context.stop)

    def routes(ids: Tensor | None) -> Tensor | None:
        return None if ids is None else _filled(ids, own, NO_EXPERT)

    rows = Rows(
        tokens=_filled(part.tokens, context, 0),
        positions=_filled(part.positions, context, 0),
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
        predictors=part.rows[here] - context.start,
        places=here.nonzero().squeeze(1),
    )


def idle(mesh: Mesh, links: Collectives) -> Slice:
    """A pass of a rank that has no microbatch left, so that it joins the collectives of the others."""
    total = mesh.layout.row_shards
    context, own = _ranges(total, mesh)
    blank = torch.zeros(len(context), dtype=torch.int64, device=mesh.device)
    attend = Ulysses(PackedAttention((Segment(start=0, stop=total),)), links)
    none = blank[:0]
    return Slice(
        source=None,
        index=-1,
        rows=Rows(tokens=blank, positions=blank, attend=attend),
        own=own,
        real=0,
        carried=None,
        predictors=none,
        places=none,
    )


def padding(rows: int, layout: Layout) -> int:
    """Padding rows of a microbatch of ``rows`` rows, so that it can be cut evenly."""
    return -rows % layout.row_shards


def _ranges(total: int, mesh: Mesh) -> tuple[range, range]:
    """(rows of a context slice, own rows)."""
    layout, at = mesh.layout, mesh.coords
    width, narrow = total // layout.context, total // layout.row_shards
    start = at.context * width
    first = start + at.tensor * narrow
    return range(start, start + width), range(first, first + narrow)


def _filled(x: Tensor, rows: range, fill: int) -> Tensor:
    """``rows`` of x; those past its end are ``fill``."""
    found = x[rows.start : rows.stop]
    missing = len(rows) - len(found)
    return torch.cat((found, x.new_full((missing, *x.shape[1:]), fill))) if missing else found


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
        self._layout, self._at = mesh.layout, mesh.coords
        config = decoders[0].config
        self._config, self._moe_layers = config, config.moe.layers if config.moe else ()
        self._stages: Stages[Slice] = Stages.at(
            mesh, links, shape=lambda one: (len(one.own), config.hidden_size), dtype=decoders[0].dtype
        )
        self._passed = 0
        self._idle = self._padding = 0

    @property
    def progress(self) -> float:
        """Passes over microbatches, and other communication of the ranks: checkpoints take long, too."""
        return float(self._passed + self._links.progress)

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        mine = self._mine(parts)
        found: dict[int, Tensor] = {}

        def loss(one: Slice, hidden: Tensor, _: Any) -> Tensor:
            logprobs, entropy = self._head(hidden, one, want_entropy=True)
            if one.source is None:
                return logprobs.sum()  # an empty sum, but other ranks wait for its backward
            found[one.index] = torch.stack((logprobs, entropy)).detach()
            return objective(one.source, Scores(logprobs=logprobs, entropy=entropy)).loss * scale

        extras = self._stages.train(mine, self._forward(ScoreOptions()), loss)
        pairs = self._everywhere([(2, len(part.rows)) for part in parts], found if self._leads else {})
        counts = self._counts(parts, mine, extras)
        outcomes = []
        for part, (logprobs, entropy), seen in zip(parts, pairs, counts, strict=True):
            entropy.requires_grad_()  # an objective that uses its gradient requires one
            scores = Scores(logprobs=logprobs, entropy=entropy, counts=seen)
            outcomes.append(objective(part, scores).detached())
        return outcomes

    def score(self, parts: Sequence[Inputs], options: ScoreOptions) -> list[Scores]:
        mine = self._mine(parts)
        found: dict[int, Tensor] = {}

        @torch.no_grad()
        def use(one: Slice, hidden: Tensor, _: Any) -> None:
            if options.logprobs and one.source is not None:
                found[one.index] = self._head(hidden.detach(), one, want_entropy=False)[0]

        with torch.set_grad_enabled(options.as_trained):
            extras = self._stages.score(mine, self._forward(options), use)
        logprobs = native = margins = [None] * len(parts)
        if options.logprobs:
            logprobs = self._everywhere([(len(part.rows),) for part in parts], found if self._leads else {})
        if self._moe_layers and options.native:
            native = self._choices(parts, mine, extras)
        if self._moe_layers and options.margins:
            # [T, L_moe] of every microbatch.
            margins = self._by_rows(parts, mine, extras, 1, (len(self._moe_layers),), self._wide)
        columns = zip(logprobs, self._counts(parts, mine, extras), native, margins, strict=True)
        return [Scores(logprobs=a, counts=b, native=c, margins=d) for a, b, c, d in columns]

    def metrics(self) -> dict[str, float]:
        """The traffic that this rank sent, and idle passes and padding rows, summed over all data ranks."""
        found = self._links.traffic.take().metrics()
        found |= {"parallel/idle_passes": float(self._idle), "parallel/padding_rows": float(self._padding)}
        self._idle = self._padding = 0
        return found

    def _mine(self, parts: Sequence[Inputs]) -> list[Slice]:
        """This rank's slices of the microbatches, in order; counts the padding that all ranks run."""
        mesh, layout = self._mesh, self._mesh.layout
        mine = [
            sliced(part, index, mesh, self._links)
            for index, part in enumerate(parts)
            if index % layout.data == mesh.coords.data
        ]
        self._padding += sum(padding(len(part.tokens), layout) for part in parts)
        if layout.couples_microbatches:
            spare = -len(parts) % layout.data
            self._idle += spare
            self._padding += spare * layout.row_shards
            mine += [idle(mesh, self._links)] * (-(-len(parts) // layout.data) - len(mine))
        return mine

    def _forward(self, options: ScoreOptions) -> Forward[Slice]:
        """The forward for ``parallel.stages``: besides the stream, each chunk returns its own choice of
        experts for own rows, and the margins."""
        gaps: list[Tensor] = []
        run = decoder_chunks(
            dict(zip(self._stages.chunks, self._decoders, strict=True)),
            self._reference if options.reference else self._adapters,
            _rows,
            ops=watching(self._ops, gaps) if options.margins else self._ops,
            recompute=self._recompute,
        )

        def forward(chunk: int, one: Slice, x: Tensor | None, /) -> tuple[Tensor, Any]:
            self._passed += 1
            out, native = run(chunk, one, x)
            margins = torch.stack(gaps, dim=1) if gaps else None
            gaps.clear()
            return out, (native, margins)

        return forward

    def _layers(self, local: int) -> list[int]:
        """The indices of a chunk's MoE layers among those of the model."""
        kept = self._decoders[local].share.layers
        return [place for place, layer in enumerate(self._moe_layers) if layer in kept]

    def _head(self, hidden: Tensor, one: Slice, *, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy [R] of all targets of a microbatch, from hidden states of own rows.

        Each tensor rank has a part of the vocabulary, each context rank its rows; the result is whole on all
        of them. So gradients flow to a context rank's own rows, and through a tensor rank's own logits.
        """
        assert one.source is not None or not len(one.predictors)
        decoder = self._decoders[-1]
        # rows may repeat, see ``LocalPasses.forward``: indexing would not sum their gradients in order
        hidden = self._links.all_gather(hidden, "t").index_select(0, one.predictors)
        if one.source is None:
            empty = hidden.sum(-1)
            return empty, empty.detach()
        if len(one.predictors):
            found = torch.stack(self._scored(decoder, hidden, one, want_entropy), dim=1)
        else:  # rows of other slices predict all targets, but other ranks wait for this part of the graph
            found = hidden.sum(-1, keepdim=True).to(self._wide).expand(-1, 2)
        if self._layout.context > 1:
            whole = found.new_zeros(len(one.source.rows), 2).index_copy(0, one.places, found)
            found = self._links.all_reduce(whole, "c")
        return found[:, 0], found[:, 1]

    def _scored(
        self, decoder: Decoder, hidden: Tensor, one: Slice, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropy) [m] of the targets whose hidden states [m, D] are here."""
        assert one.source is not None
        support = one.source.source.support
        head, targets = decoder.head_weight, one.source.targets[one.places]
        options: dict[str, Any] = {
            "support": None if support is None else support.take(one.places.cpu().numpy()),
            "temperature": self._temperature,
            "want_entropy": want_entropy,
            "vocabulary": self._vocabulary(head),
        }
        if head.requires_grad:
            return chunked_logprobs(hidden, targets, decoder.logits, **options)
        options["entropy_grad"] = want_entropy and self._entropy_grad
        options["matmul_nt"], options["matmul_nn"] = head_products(decoder, self._ops)
        return linear_logprobs(hidden, head, targets, **options)

    def _vocabulary(self, head: Tensor) -> Vocabulary | None:
        if self._layout.tensor == 1:
            return None
        return Vocabulary(
            start=self._at.tensor * len(head),
            size=len(head),
            sum=lambda x: self._links.sum_(x.contiguous(), "t"),
            max=lambda x: self._links.max_(x.contiguous(), "t"),
        )

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of log-probabilities."""
        return torch.promote_types(self._decoders[0].dtype, torch.float32)

    @property
    def _leads(self) -> bool:
        """Whether this rank, of those with a microbatch's log-probabilities, is the one that sends them."""
        return self._stages.is_last and self._at.context == 0 and self._at.tensor == 0

    def _everywhere(self, shapes: Sequence[Sequence[int]], own: Mapping[int, Tensor]) -> list[Any]:
        device = self._decoders[0].device
        return all_gather_ragged(self._links, shapes, own, dtype=self._wide, device=device)

    def _counts(self, parts: Sequence[Inputs], mine: Sequence[Slice], extras: Any) -> list[Tensor | None]:
        """``gate.row_counts`` over all layers and rows: the sum of what each rank counts for its own."""
        if not self._moe_layers or all(part.carried is None for part in parts):
            return [None] * len(parts)
        shapes = [(3, len(part.tokens) if part.carried is not None else 0) for part in parts]
        own = {}
        for place, one in enumerate(mine):
            if one.source is None or one.carried is None:
                continue
            counts = one.places.new_zeros(shapes[one.index])
            for local in range(len(self._decoders)):
                native = extras[local][place][0]
                if native is not None:
                    rows = slice(one.own.start, one.own.start + one.real)
                    carried = one.carried[: one.real, self._layers(local)]
                    counts[:, rows] += row_counts(native[: one.real], carried)
            own[one.index] = counts
        device = self._decoders[0].device
        found = all_gather_ragged(self._links, shapes, own, dtype=torch.int64, device=device)
        return [None if part.carried is None else one for part, one in zip(parts, found, strict=True)]

    def _choices(self, parts: Sequence[Inputs], mine: Sequence[Slice], extras: Any) -> list[Tensor]:
        """[T, L_moe, K] int16 of every microbatch."""
        assert self._config.moe is not None
        widths = (len(self._moe_layers), self._config.moe.top_k)
        found = self._by_rows(parts, mine, extras, 0, widths, torch.int32)  # gloo has no sums of 16 bits
        return [one.to(torch.int16) for one in found]

    def _by_rows(
        self,
        parts: Sequence[Inputs],
        mine: Sequence[Slice],
        extras: Any,
        which: int,
        widths: tuple[int, ...],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """[T, L_moe, ...] of every microbatch, from what a chunk's forward gave for own rows and layers."""
        device = self._decoders[0].device
        shapes = [(len(part.tokens), *widths) for part in parts]
        own = {}
        for place, one in enumerate(mine):
            if one.source is None:
                continue
            values = torch.zeros(shapes[one.index], dtype=dtype, device=device)
            for local in range(len(self._decoders)):
                part = extras[local][place][which]
                if part is not None:
                    rows = slice(one.own.start, one.own.start + one.real)
                    values[rows, self._layers(local)] = part[: one.real].to(dtype)
            own[one.index] = values
        return all_gather_ragged(self._links, shapes, own, dtype=dtype, device=device)


def _rows(one: Slice) -> Rows:
    return one.rows
