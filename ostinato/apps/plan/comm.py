"""Bytes that one rank sends in a step, by collective and axis, as ``ostinato.parallel`` sends them.

The unit is a ``Message``: so many equal collectives, each of so many bytes, by the convention of
``parallel.collectives``: a ring's gather or reduction of B bytes over n ranks sends B (n - 1) / n, an
all-reduce twice that; of all-to-all and point to point counts what goes to others. An axis of one rank
says nothing.

    enter, leave      rows of a context slice are gathered before what has cut outputs, partial sums are
                      scattered after what has cut inputs: twice per layer, each the other's backward
    experts           a row goes once to every rank that keeps an expert of its, with its ids and weights, and
                      one partial sum comes back; expected for even routing without replacement
    context           queries, keys and values in one exchange before attention, its output in another
    pipeline          the residual stream of own rows, and its gradient
    gradients         those of what several ranks keep alike are summed once per optimizer step

A test (tests/e2e/test_comm_bytes.py) counts a real step and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ostinato.apps.plan.imbalance import distinct_ranks
from ostinato.model.config import ModelConfig
from ostinato.model.flops import layer_rates
from ostinato.model.shapes import AdapterSpec, adapter_shapes
from ostinato.parallel.layout import Layout

Copies = tuple[float, float]  # of rows on the way to other expert ranks, and from them
INDEX, SLOT, SCORE = 8.0, 4.0, 4.0  # bytes of a count or a router's id, of an id on its way, of a weight
CHUNK = 256  # rows of the head at a time (``algo.logprobs``)


class Message(NamedTuple):
    """``calls`` collectives, in each of which one rank sends ``sent`` bytes."""

    operation: str
    axis: str
    sent: float
    calls: float = 1.0


class Sent(NamedTuple):
    """What messages add up to."""

    calls: float
    bytes: float


def total(messages: Iterable[Message]) -> dict[tuple[str, str], Sent]:
    """By (operation, axis)."""
    found: dict[tuple[str, str], Sent] = {}
    for one in messages:
        before = found.get((one.operation, one.axis), Sent(0.0, 0.0))
        found[one.operation, one.axis] = Sent(before.calls + one.calls, before.bytes + one.calls * one.sent)
    return found


def times(messages: Iterable[Message], number: float) -> list[Message]:
    """The same, so often."""
    return [one._replace(calls=one.calls * number) for one in messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What the messages of one layer depend on beside its sizes."""

    mixture: bool
    below: bool  # something below is trained: its input needs a gradient
    inside: bool  # its MLP's input needs one
    after: bool  # its output does


@lru_cache(maxsize=32)
def layers_of(config: ModelConfig, adapter: AdapterSpec | None) -> tuple[Layer, ...]:
    """Of every layer of a model of which ``adapter`` is trained, or all with None."""
    adapted = set(adapter_shapes(config, adapter)) if adapter else set()
    rates = layer_rates(config, adapter)
    moe_layers = config.moe.layers if config.moe else ()
    found, below = [], adapter is None
    for index, one in enumerate(rates):
        inside = below or any(name.startswith(f"layers.{index}.attn.") for name in adapted)
        found.append(Layer(mixture=index in moe_layers, below=below, inside=inside, after=one.needed))
        below = one.needed
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Messages of a model under a layout; ``width``: bytes of an activation.

    Rows are those of a microbatch of one data rank, over all its context and tensor ranks, padding included.
    """

    config: ModelConfig
    layout: Layout
    width: float

    def forward(self, layer: Layer, rows: float, remote: Copies | None = None) -> list[Message]:
        """Of one layer. ``remote``: copies of rows that go to other expert ranks and that come, where
        known."""
        enter, leave = self._rows("all_gather", rows), self._rows("reduce_scatter", rows)
        found = [*enter, *self._context(rows), *leave]
        if not layer.mixture:
            return found + enter + leave
        return found + self._experts(rows, remote) + (enter + leave if self._shared else [])

    def again(self, layer: Layer, rows: float, remote: Copies | None = None, *, ends: bool) -> list[Message]:
        """What recomputing a layer says. It stops at the last tensor that the backward needs: where a layer
        ``ends`` a chunk that is not the model's last, no norm reads its sum, which is then not made again."""
        found = self.forward(layer, rows, remote)
        if not ends:
            return found
        if not layer.mixture or self._shared:
            return found[:-1] if self.layout.tensor > 1 else found
        trailing = (self.layout.expert > 1) + (self.layout.expert_tensor > 1)
        return found[: len(found) - trailing]

    def backward(self, layer: Layer, rows: float, remote: Copies | None = None) -> list[Message]:
        """What a layer's backward says beside recomputing the forward."""
        if not layer.after:
            return []
        enter, leave = self._rows("reduce_scatter", rows), self._rows("all_gather", rows)
        found = self._experts_back(layer, rows, remote) if layer.mixture else []
        if self._shared or not layer.mixture:
            found += leave + (enter if layer.inside else [])
        if layer.inside:
            found += leave + self._context(rows) + (enter if layer.below else [])
        return found

    def embed(self, rows: float) -> list[Message]:
        """Looking tokens up."""
        return self._rows("reduce_scatter", rows)

    def embed_back(self, rows: float) -> list[Message]:
        """The backward of that, where the embedding is trained."""
        return self._rows("all_gather", rows)

    def head(self, targets: float, rows: float, here: float | None = None, passes: int = 1) -> list[Message]:
        """Log-probabilities of ``targets``, ``here`` of them predicted by rows of this context slice, over a
        vocabulary that is cut: hidden states of the slice are gathered, maxima and three sums of its targets
        go around, and what slices found is put together. ``passes``: through the logits, which a trained head
        runs once more in backward."""
        here = targets / self.layout.context if here is None else here
        chunks = -(-here // CHUNK) * passes
        found = self._rows("all_gather", rows)
        for columns in (1, 3) if here else ():
            size = here * columns * SCORE * passes
            found += [one._replace(sent=one.sent / chunks, calls=chunks) for one in self._over("t", size)]
        return found + self._over("c", targets * 2 * SCORE)

    def head_back(self, rows: float) -> list[Message]:
        """The backward of the gather; of a pass of padding, too."""
        return self._rows("reduce_scatter", rows)

    def idle_head(self, rows: float) -> list[Message]:
        """Of a pass of padding."""
        return self._rows("all_gather", rows)

    def _over(self, axis: str, size: float) -> list[Message]:
        return ring("all_reduce", axis, self.layout.tensor if axis == "t" else self.layout.context, size)

    def pass_on(self, rows: float) -> list[Message]:
        """A residual stream, or its gradient, to the next stage."""
        if self.layout.pipeline == 1:
            return []
        own = rows / self.layout.row_shards
        return [Message("send_recv", "p", own * self.config.hidden_size * self.width)]

    @property
    def _shared(self) -> bool:
        return self.config.moe is not None and self.config.moe.shared_intermediate_size > 0

    def _rows(self, operation: str, rows: float, width: float | None = None) -> list[Message]:
        """A collective over t of all rows of a context slice; ``width``: bytes of a row."""
        width = self.config.hidden_size * self.width if width is None else width
        return ring(operation, "t", self.layout.tensor, rows / self.layout.context * width)

    def _context(self, rows: float) -> list[Message]:
        c, config = self.layout.context, self.config
        if c == 1:
            return []
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * (config.head_dim + config.v_head_dim)
        out = config.num_heads * config.v_head_dim
        share = rows / c * self.width * (c - 1) / c / self.layout.tensor
        return [Message("all_to_all", "c", size * share) for size in (queries + keys, out)]

    def _experts(self, rows: float, remote: Copies | None) -> list[Message]:
        moe, layout = self.config.moe, self.layout
        assert moe is not None
        k, found = moe.top_k, list[Message]()
        if layout.expert_tensor > 1:
            for size in (None, k * INDEX, k * SCORE):
                found += self._rows("all_gather", rows, size)
        if layout.expert > 1:
            out, back = remote or self._even(rows)
            row = self.config.hidden_size * self.width
            sizes = ((layout.expert - 1) * INDEX, out * k * SLOT, out * row, out * k * SCORE, back * row)
            found += [Message("all_to_all", "e", size) for size in sizes]
        return found + (self._rows("reduce_scatter", rows) if layout.expert_tensor > 1 else [])

    def _experts_back(self, layer: Layer, rows: float, remote: Copies | None) -> list[Message]:
        moe, layout = self.config.moe, self.layout
        assert moe is not None
        cut, found = layout.expert_tensor > 1, list[Message]()
        if cut:
            found += self._rows("all_gather", rows)
        scores = moe.top_k * SCORE
        if layout.expert > 1:
            out, back = remote or self._even(rows)
            row = self.config.hidden_size * self.width
            sizes = (out * row, *((back * row, back * scores) if layer.inside else ()))
            found += [Message("all_to_all", "e", size) for size in sizes]
        if cut and layer.inside:
            found += self._rows("reduce_scatter", rows) + self._rows("reduce_scatter", rows, scores)
        return found

    def _even(self, rows: float) -> Copies:
        moe, layout = self.config.moe, self.layout
        assert moe is not None
        own = rows / (layout.context if layout.expert_tensor > 1 else layout.row_shards)
        copies = own * remote_copies(moe.num_experts, moe.top_k, layout.expert)
        return copies, copies


@lru_cache(maxsize=256)
def remote_copies(experts: int, top_k: int, ranks: int) -> float:
    """How many other ranks a row goes to, on average, where all choices of experts are equally likely."""
    return distinct_ranks(experts, top_k, ranks) * (ranks - 1) / ranks


def ring(operation: str, axis: str, ranks: int, size: float) -> list[Message]:
    """A gather or reduction of ``size`` bytes in all; an all-reduce is one of each."""
    if ranks == 1:
        return []
    passes = 2.0 if operation == "all_reduce" else 1.0
    return [Message(operation, axis, passes * size * (ranks - 1) / ranks)]


Traffic = Mapping[tuple[str, str], Sent]
