"""Runs a pipeline schedule: one optimizer step's microbatches through one rank's chunks of the model.

    for action in schedule.list_actions(...)[this rank]:
        Receive   post it, go on
        forward   take what came in, run the chunk, keep its graph
        backward  take the gradient (on the last chunk: of the loss), run the graph backwards, drop it
        Send      post it, go on

One tensor passes between chunks for a microbatch, the residual stream [rows, D], and its gradient comes back;
the next chunk norms it itself. Microbatches are packed rows without padding, so each has its own number of
rows; all ranks know the batch, hence every shape, and nothing is negotiated. That is why this is not
``torch.distributed.pipelining``: its stages infer one shape, from the first microbatch, and receive all
others into buffers of it (as of torch 2.13). The schedules are the same, and so is what is underneath: isend
and irecv, on gloo or nccl.

A chunk adds up its gradients in the order of the microbatches, as the plain loop does: with one stage this is
that loop, and with more the gradients are the same bits. What is in flight (``schedule.count_in_flight``) is
kept and nothing else: of an output that was sent the graph alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ostinato.parallel.collectives import Collectives, Mesh, Pending
from ostinato.parallel.schedule import Compute, Pass, Receive, Schedule, Send, list_actions

Part = TypeVar("Part")
PartIn = TypeVar("PartIn", contravariant=True)

MAX_UNCONFIRMED = 2  # sends on their way, one in each direction: a tensor is kept until it has arrived
AXIS = "p"


class PipelineBroken(RuntimeError):
    """Another stage did not send or receive a tensor: it died, hangs, or lost its connection. The message
    names the stage, the tensor and the time that was waited, at most the timeout of the process group. (With
    nccl the device waits, and torch's watchdog ends the process after that timeout.)"""


class Forward(Protocol[PartIn]):
    """A microbatch through one chunk: (chunk, microbatch, residual stream or None for the first chunk) ->
    (output, extras). The output is the residual stream or, of the last chunk, the hidden states [rows, D];
    the extras are detached, and returned to the caller. Gradients go to the chunk's parameters."""

    def __call__(self, chunk: int, part: PartIn, x: Tensor | None, /) -> tuple[Tensor, Any]: ...


Extras = list[list[Any]]  # the extras of ``Forward``, by own chunk in order of depth, by microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages(Generic[Part]):
    """One rank of a pipeline of ``stages`` ranks with ``virtual`` chunks each. The defaults are
    no pipeline at all, and need no links.

    ``shape``: of the residual stream of a microbatch here, (own rows, D); ``dtype``: of it.
    """

    shape: Callable[[Part], tuple[int, int]]
    dtype: torch.dtype
    links: Collectives | None = None
    stage: int = 0
    stages: int = 1
    virtual: int = 1

    @classmethod
    def at(
        cls, mesh: Mesh, links: Collectives, *, shape: Callable[[Part], tuple[int, int]], dtype: torch.dtype
    ) -> Stages[Part]:
        """The stages as this rank of ``mesh`` runs them."""
        layout, place = mesh.layout, mesh.coords.pipeline
        return cls(
            shape=shape,
            dtype=dtype,
            links=links if layout.pipeline > 1 else None,
            stage=place,
            stages=layout.pipeline,
            virtual=layout.virtual,
        )

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.stages:
            raise ValueError(f"stage is {self.stage} of {self.stages}; use 0 to {self.stages - 1}")
        if self.stages > 1 and self.links is None:
            raise ValueError(f"stages is {self.stages}, but links is None; give the links of this rank")

    @property
    def chunks(self) -> range:
        """Indices of this stage's chunks among those of all stages."""
        return range(self.stage, self.stages * self.virtual, self.stages)

    @property
    def is_last(self) -> bool:
        """Whether the last chunk, with head and loss, runs on this stage."""
        return self.stage == self.stages - 1

    def train(
        self, parts: Sequence[Part], forward: Forward[Part], loss: Callable[[Part, Tensor, Any], Tensor]
    ) -> Extras:
        """Run forward and backward of all microbatches, and add up their gradients.

        ``loss``: (microbatch, hidden states, extras) -> scalar, called on the last stage alone, in the order
        of the microbatches, each just before its backward.
        Raises PipelineBroken, and whatever ``forward`` and ``loss`` raise; other stages break in their turn.
        """
        run = _Run(self, parts, forward)
        for action in self._plan_actions(Schedule.training(self.virtual), len(parts)):
            match action:
                case Compute(direction=Pass.FORWARD):
                    run.forward(action)
                case Compute():
                    run.backward(action, loss)
                case Send():
                    run.send(action)
                case Receive():
                    run.post(action)
        run.settle()
        return run.extras

    def score(
        self, parts: Sequence[Part], forward: Forward[Part], use: Callable[[Part, Tensor, Any], None]
    ) -> Extras:
        """Run the forward of all microbatches; ``use``: (microbatch, hidden states, extras), called on the
        last stage alone, in the order of the microbatches.

        Gradients are on or off as the caller has them. If on, every chunk runs the very forward of training,
        and its graph is dropped at once. Raises as ``train`` does.
        """
        run = _Run(self, parts, forward)
        for action in self._plan_actions(Schedule.FORWARD, len(parts)):
            match action:
                case Compute():
                    hidden = run.forward(action, keep=False)
                    if action.chunk == self.stages * self.virtual - 1:
                        use(parts[action.part], hidden, run.extras[-1][-1])
                case Send():
                    run.send(action)
                case Receive():
                    run.post(action)
        run.settle()
        return run.extras

    def _plan_actions(self, schedule: Schedule, parts: int) -> Sequence[Compute | Send | Receive]:
        """The actions of this stage for ``parts`` microbatches."""
        if not parts:
            return ()
        return list_actions(schedule, ranks=self.stages, virtual=self.virtual, parts=parts)[self.stage]


@dataclass(slots=True)
class _Graph:
    """The results of a forward that its backward needs, kept until then."""

    x: Tensor | None  # the input: a leaf, whose gradient is sent to the chunk before
    out: GradientEdge | None  # of the output; None: nothing here is trained, or it is the last chunk
    hidden: Tensor | None  # the output of the last chunk, for the loss
    extras: Any  # of the last chunk, for the loss


@dataclass(slots=True)
class _Run(Generic[Part]):
    """The state of one run of a schedule on this rank."""

    stages: Stages[Part]
    parts: Sequence[Part]
    chunk: Forward[Part]
    extras: Extras = field(init=False)
    _graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    _outputs: dict[Compute, Tensor] = field(default_factory=dict)  # not yet sent, or for the next chunk here
    _pending_receives: dict[Compute, tuple[int, Pending]] = field(default_factory=dict)
    _pending_sends: deque[tuple[Send, Pending]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.extras = [[] for _ in self.stages.chunks]

    def forward(self, action: Compute, keep: bool = True) -> Tensor:
        """Run a chunk and return its output. The extras are stored, and the output, detached, unless the
        chunk is the last. ``keep``: keep its graph for the backward."""
        chunk, part = action.chunk, self.parts[action.part]
        x = None
        if chunk:  # it always requires a gradient: without one some kernels multiply in another order
            x = self._take(Compute(Pass.FORWARD, chunk - 1, action.part))
            x.requires_grad_(torch.is_grad_enabled())
        out, extras = self.chunk(chunk, part, x)
        self.extras[chunk // self.stages.stages].append(extras)
        is_last = chunk == self.stages.stages * self.stages.virtual - 1
        if not is_last:
            self._outputs[action] = out.detach()
        if keep:
            edge = get_gradient_edge(out) if out.requires_grad and not is_last else None
            kept_for_loss = (out, extras) if is_last else (None, None)
            self._graphs[chunk, action.part] = _Graph(x, edge, *kept_for_loss)
        return out

    def backward(self, action: Compute, loss: Callable[[Part, Tensor, Any], Tensor]) -> None:
        """Run the graph of a chunk backwards, drop it, and store the gradient of its input. Raises ValueError
        if the output of the chunk does not depend on its input."""
        chunk, index = action.chunk, action.part
        graph = self._graphs.pop((chunk, index))
        if graph.hidden is not None:
            loss(self.parts[index], graph.hidden, graph.extras).backward()
        else:
            grad = self._take(Compute(Pass.BACKWARD, chunk + 1, index))
            if graph.out is not None:
                torch.autograd.backward((graph.out,), (grad,))
        if graph.x is not None:
            if graph.x.grad is None:
                raise ValueError(
                    f"the output of chunk {chunk} does not depend on its input; return one that does"
                )
            self._outputs[action] = graph.x.grad

    def post(self, action: Receive) -> None:
        """Begin to receive the output of a computation on another stage."""
        assert self.stages.links is not None
        shape, dtype, source = (
            self.stages.shape(self.parts[action.compute.part]),
            self.stages.dtype,
            action.source,
        )
        with _translate_errors(self.stages.stage, f"the {action.compute} from stage {source}"):
            self._pending_receives[action.compute] = (
                source,
                self.stages.links.receive(shape, dtype, AXIS, source),
            )

    def send(self, action: Send) -> None:
        """Begin to send, and wait until at most ``MAX_UNCONFIRMED`` sends are on their way. That cannot
        deadlock: a schedule ends even if every send blocks (``parallel.schedule``)."""
        assert self.stages.links is not None
        with _translate_errors(self.stages.stage, f"stage {action.receiver} to take the {action.compute}"):
            self._pending_sends.append(
                (action, self.stages.links.send(self._outputs.pop(action.compute), AXIS, action.receiver))
            )
        self.settle(MAX_UNCONFIRMED)

    def settle(self, unconfirmed: int = 0) -> None:
        """Wait until at most ``unconfirmed`` sends are on their way."""
        while len(self._pending_sends) > unconfirmed:
            action, pending = self._pending_sends.popleft()
            with _translate_errors(
                self.stages.stage, f"stage {action.receiver} to take the {action.compute}"
            ):
                pending.wait()

    def _take(self, of: Compute) -> Tensor:
        """Remove and return the output of a computation; one of another rank is awaited."""
        if of not in self._pending_receives:
            return self._outputs.pop(of)
        source, pending = self._pending_receives.pop(of)
        with _translate_errors(self.stages.stage, f"the {of} from stage {source}"):
            return pending.wait()


@contextmanager
def _translate_errors(stage: int, what: str) -> Iterator[None]:
    """Replace a RuntimeError in the context by PipelineBroken, whose message says that ``what`` was
    awaited."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        waited_s = time.monotonic() - start
        raise PipelineBroken(f"stage {stage} waited {waited_s:.1f} s for {what}, in vain: {error}") from error
