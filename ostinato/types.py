"""The nouns of Ostinato: Prompt -> Trajectory (turns) -> Group -> Sample -> Batch.

One alignment law holds everywhere: a per-token array has length ``len(tokens)`` and entry ``t``
describes token ``t``; context tokens carry mask False, log-probability 0 and advantage 0. The
next-token shift happens in one function, ``algo.pack.pack``, and nowhere else.

Everything here is a frozen dataclass of numpy arrays. This module imports nothing else of ours.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

import numpy as np

NO_EXPERT = -1  # routing of a token that never passed through the layers (the last one sampled)
Constraint = Callable[[np.ndarray], np.ndarray]  # tokens of an answer -> [vocabulary] bool: banned next


def _format_brief(self: Any) -> str:
    """The repr of a dataclass with arrays as type and shape, and tuples of dataclasses as their number.

    ``asyncio.run`` formats its main task with the result whenever it ends (``signal`` looks the handler up as
    an enum member and discards the message), so a repr must be cheap for values of any size.
    """
    values = (f"{field.name}={_format_value(getattr(self, field.name))}" for field in fields(self))
    return f"{type(self).__name__}({', '.join(values)})"


def _format_value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return f"<{len(value)} {type(value[0]).__name__}>"
    return reprlib.repr(value)


class Stop(StrEnum):
    """The reason why a completion or an episode ended."""

    EOS = "eos"  # a stop token was sampled
    STRING = "string"  # a stop string appeared in the text
    LENGTH = "length"  # max_tokens or the context was used up: truncated
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"  # a named failure; never trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of drawing one completion. ``top_k=0``, ``top_p=1`` and ``min_p=0`` mean off;
    ``temperature=0`` is greedy. Raises ValueError for a value out of range.

    Order of the filters as in vLLM: temperature, then top-k, top-p, min-p on the scaled distribution.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0  # stop tokens cannot be sampled before this many tokens
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-4 <= self.temperature < float("inf")):
            raise ValueError(  # below, logits divided by it leave what fp32 can hold
                f"sampling.temperature is {self.temperature}; use 0 (greedy) or a number from 0.0001"
            )
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k is {self.top_k}; use 0 (off) or a positive integer")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; use a number in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"sampling.min_p is {self.min_p}; use a number in [0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens is {self.max_tokens}; use at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"sampling.min_tokens is {self.min_tokens}; use 0 to max_tokens ({self.max_tokens})"
            )

    @property
    def filtered(self) -> bool:
        """Whether a filter may remove tokens before one is drawn; False for greedy sampling, which draws
        none."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Support:
    """The token ids that each of T tokens was drawn from, ragged: those that top-k, top-p and min-p had kept.

    A count of 0 is the whole vocabulary (no filter cut anything, or the token is context). A trainer whose
    log-probabilities are normalised over the same ids has the sampler's action space ("Keep Sampling Mask",
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """

    counts: np.ndarray  # [T] int32
    ids: np.ndarray  # [sum of counts] int32, ascending within a token

    __repr__ = _format_brief

    def __post_init__(self) -> None:
        if (total := int(self.counts.sum())) != len(self.ids):
            raise ValueError(f"support has {len(self.ids)} ids where its counts add up to {total}")

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def whole(cls, length: int) -> Support:
        """No token is restricted."""
        return cls(counts=np.zeros(length, np.int32), ids=np.empty(0, np.int32))

    @classmethod
    def of(cls, ids_by_token: Sequence[np.ndarray]) -> Support:
        """The support of tokens, from the ids [n] of each."""
        counts = np.array([len(ids) for ids in ids_by_token], np.int32)
        return cls(counts=counts, ids=np.concatenate([np.empty(0, np.int32), *ids_by_token]))

    @classmethod
    def concatenate(cls, parts: Sequence[Support]) -> Support:
        """The parts one after another; at least one."""
        counts = np.concatenate([part.counts for part in parts])
        return cls(counts=counts, ids=np.concatenate([part.ids for part in parts]))

    def split(self, size: int) -> list[Support]:
        """Pieces of ``size`` tokens (the last may be shorter); views, nothing is copied."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        starts = range(0, len(self), size)
        edges = [0, *(int(ends[min(start + size, len(self)) - 1]) for start in starts)]
        return [
            Support(counts=self.counts[start : start + size], ids=self.ids[edges[n] : edges[n + 1]])
            for n, start in enumerate(starts)
        ]

    def take(self, tokens: np.ndarray) -> Support:
        """The support of the tokens at these indices ([n], ascending)."""
        mask = np.zeros(len(self), bool)
        mask[tokens] = True
        return Support(counts=self.counts[mask], ids=self.ids[np.repeat(mask, self.counts)])

    def holds(self, tokens: np.ndarray) -> np.ndarray:
        """[T] bool: whether token t of ``tokens`` ([T] ids) is among the ids that it was drawn from."""
        owners = np.repeat(np.arange(len(self)), self.counts)
        result = self.counts == 0
        result[owners[self.ids == np.repeat(tokens, self.counts)]] = True
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A request to an engine. ``seed`` addresses the noise: (run seed, step, prompt, sample).

    The token at absolute position p of the sequence uses the noise of ``(*seed, p)``, so neither the
    batch, nor preemption, nor the number of workers changes a token, and turns never share noise.
    """

    tokens: np.ndarray  # [P] int32, the whole context
    sampling: Sampling
    seed: tuple[int, ...]
    uid: str = ""  # of the Prompt: whose history may be drafted from; empty: unknown
    routes_from: int = 0  # the first token whose routes are returned: the caller has those before it
    policy: str = ""  # by name, of those that the engine serves; "": the one that is trained
    top_logprobs: int = 0  # listeners get so many of the likeliest tokens beside each that was drawn
    salt: str = ""  # keys and values of equal prefixes are shared among requests of one salt alone
    constraint: Constraint | None = None  # an answer of which it bans every next token ends as an ERROR


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emitted:
    """The addition of one pass to an answer: T tokens, more than one where drafts were accepted.

    ``top``: for each token the likeliest ones and their log-probabilities, best first, under the distribution
    that was sampled from; temperature 0 counts as 1.
    """

    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    top: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # T times ([n] int, [n] float32)
    version: int = 0  # of the policy that sampled them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """The answer of an engine. Arrays are aligned with ``tokens`` (length T).

    ``logprobs`` are under the distribution that was really sampled from (after temperature and filters).
    ``experts[t]`` are the experts that token t chose on its way through the layers; the last sampled
    token was never an input, so its row is NO_EXPERT.

    ``edges[t]`` is the probability of all tokens before token t in vocabulary order. The sampler draws by
    inverse transform, so the uniform of t fell into [edge, edge + p). The next policy is similar, so a
    uniform in that interval will most likely give the same token under it.

    ``support`` is None if no filter was on, or if none was recorded. It includes the bans of ``min_tokens``
    only if a filter is on, too.

    ``injected`` marks tokens that were put into the answer and not sampled (``rollout.interrupt``): their
    log-probability is 0 and their version -1, and nothing is learned from them. None: all were sampled.
    """

    tokens: np.ndarray  # [T] int32, the stop token included when one was sampled
    logprobs: np.ndarray  # [T] float32
    edges: np.ndarray | None = None  # [T] float32
    versions: np.ndarray  # [T] int32, the policy version that sampled each token
    stop: Stop
    text: str = ""  # decoded without special tokens, up to a stop string; empty without a tokenizer
    experts: np.ndarray | None = None  # [T, moe_layers, top_k] int8, from 129 experts on int16
    prompt_experts: np.ndarray | None = None  # [P - routes_from, moe_layers, top_k] alike
    support: Support | None = None  # of T tokens
    injected: np.ndarray | None = None  # [T] bool
    drafted: int = 0  # draft tokens that were verified for it
    accepted: int = 0  # of them, those that turned out to be what is sampled
    passes: int = 0  # forward passes that gave it a token
    cached_tokens: int = 0  # prompt tokens whose keys and values were found in the prefix tree
    recomputed: np.ndarray | None = None  # [n, 2] int32: positions [from, to) run again, by preemption
    error: str = ""  # one sentence when stop is ERROR

    __repr__ = _format_brief

    def __post_init__(self) -> None:
        for name in ("logprobs", "edges", "versions", "experts", "support", "injected"):
            array = getattr(self, name)
            if array is not None and len(array) != len(self.tokens):
                raise ValueError(f"{name} has {len(array)} entries for {len(self.tokens)} tokens")

    @property
    def num_injected(self) -> int:
        return 0 if self.injected is None else int(self.injected.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Publication:
    """A policy on its way to the samplers: adapters alone (megabytes), or all weights if all are trained.

    ``fingerprint``: of the weights that a sampler has to serve after it has read ``payload``; empty: the
    base.
    """

    version: int
    fingerprint: str
    payload: Any = None  # ``model.wire.pack_adapters`` of the adapters; None: the base, without adapters
    size: int = 0  # bytes of the payload
    path: str = ""  # a file that holds a large payload instead, for samplers of the same host
    answers: tuple[
        tuple[str, int, tuple[HistoryEntry, ...]], ...
    ] = ()  # (uid, step, answers), from which later answers are drafted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PollResult:
    """The report of a sampler: ended answers, and proof of the weights that it serves."""

    done: tuple[tuple[int, Completion], ...]  # (id of the call, answer); dropped calls end as ABORT
    version: int
    fingerprint: str  # of the weights that it serves, computed from these
    sampled: int  # tokens since it began, by which progress is measured; -1: unknown
    progress: tuple[tuple[int, int], ...] = ()  # (id, tokens so far) of calls that run, where it is known
    spans: tuple[Any, ...] = ()  # ``timeline.Span``: what it did since it was last queried
    counters: Mapping[str, float] = field(default_factory=dict)  # of its engine, since it began

    __repr__ = _format_brief


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One task instance: what the policy sees, and what the reward needs to know.

    ``messages`` is a chat ([{"role": .., "content": ..}]) or ``text`` a plain string; exactly one is
    set. A chat is rendered with ``tools`` (JSON schemas) and ``template_kwargs`` by the chat template.
    ``columns`` are the other fields of the row (``answer`` and so on), passed to rewards.
    """

    uid: str  # stable over epochs and runs: the key of histories
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""  # by name, where several are mixed
    row: str = field(default="", compare=False)  # "row 3 of rows.jsonl", for errors

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.uid}: give exactly one of text and messages")

    @property
    def where(self) -> str:
        """The name of the prompt in errors."""
        return self.row or f"prompt {self.uid}"

    @property
    def prefill(self) -> str | None:
        """The assistant's words at the end of a chat, with which its answer begins; None without."""
        last_message = self.messages[-1] if self.messages else {}
        return str(last_message.get("content") or "") if last_message.get("role") == "assistant" else None


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """A context that does not continue the one before: an agent's other conversation, or a compacted one."""

    tokens: np.ndarray  # [P] int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Tokens put before the policy since its last word, and its answer."""

    context: np.ndarray  # [C] int32: the prompt in turn 0, a tool's reply later
    completion: Completion
    new_row: bool = False  # the context is a whole prompt, which does not continue the turns before it
    in_thought: bool = False  # the answer ends inside a thought, its own or one that the context had opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A verdict. ``value`` None means no verdict (a fault or a skip): counted by ``reason``, never scored
    0.
    """

    value: float | None
    reason: str = ""
    parts: Mapping[str, float | None] = field(default_factory=dict)  # by reward function
    failed: Mapping[str, str] = field(default_factory=dict)  # by function: what is wrong, and its traceback
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged by functions, of the whole group
    extra: Mapping[str, Any] = field(default_factory=dict)  # logged by functions, of this answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode: turns in order, token in and token out, never re-tokenised.

    tokens = context_0 answer_0 context_1 answer_1 ...; ``stop`` is why the episode ended. A turn with
    ``new_row`` begins another row of tokens.
    """

    turns: tuple[Turn, ...]
    stop: Stop
    seed: tuple[int, ...]
    reward: Reward | None = None
    env_reward: float | None = None  # of the environment itself, where it gives one
    ended: str = ""  # how the environment ended it: "terminated", "truncated" or "max_turns"
    last_reply: str = ""  # of the environment, which the policy did not see
    error: str = ""

    __repr__ = _format_brief

    @property
    def rows(self) -> list[tuple[Turn, ...]]:
        """The turns of each row of tokens; one row for an episode that only grows."""
        starts = [k for k, turn in enumerate(self.turns) if turn.new_row or not k]
        return [
            self.turns[start:stop] for start, stop in zip(starts, [*starts, len(self.turns)][1:], strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Siblings: the trajectories of one prompt, graded together."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    step: int  # the step that requested it

    __repr__ = _format_brief


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trainable sequence. Entry t of every array describes token t; context tokens are masked.

    Two turns (prompt P, answer A, tool reply R, answer B), advantage a::

        tokens      P P A A R B
        loss_mask   0 0 1 1 0 1
        advantages  0 0 a a 0 a
    """

    tokens: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool
    logprobs: np.ndarray  # [L] float32, of the behaviour policy
    advantages: np.ndarray  # [L] float32
    versions: np.ndarray  # [L] int32, -1 on context
    group: int  # index of the group in the step: siblings share a prompt
    prompt_len: int  # length of the context of turn 0, equal for siblings
    uid: str = ""  # "prompt uid#sample": what a refused step names
    member: int | None = None  # of the group: rows of one episode count as one; None: a row by itself
    experts: np.ndarray | None = None  # [L, moe_layers, top_k], typed as in Completion
    support: Support | None = None  # of L tokens; None: the whole vocabulary everywhere

    __repr__ = _format_brief

    def __post_init__(self) -> None:
        for name in ("loss_mask", "logprobs", "advantages", "versions", "experts", "support"):
            array = getattr(self, name)
            if array is not None and len(array) != len(self.tokens):
                raise ValueError(f"{name} has {len(array)} entries for {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows [start, stop) of a packed microbatch: causal among themselves, and each sees all of
    [prefix_start, prefix_stop) (a prompt computed once for its siblings; empty when equal)."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Packed rows for one forward and backward, without padding.

    Two siblings A A and B B of prompt P P P (loss on A and B); the last token of each is only a target::

        row        0 1 2 3 4
        tokens     P P P A B
        positions  0 1 2 3 3
        segments   [0,3) [3,4)<-[0,3) [4,5)<-[0,3)
        rows       2 3 2 4          rows whose hidden states predict the targets
        targets    A A B B

    All arrays below ``rows`` have length R, one entry per trained token, in the order of ``targets``.
    """

    tokens: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32
    segments: tuple[Segment, ...]
    rows: np.ndarray  # [R] int32, index into T
    targets: np.ndarray  # [R] int32, token ids
    logprobs: np.ndarray  # [R] float32, behaviour policy
    advantages: np.ndarray  # [R] float32
    weights: np.ndarray  # [R] float32: aggregation weight, sums to 1 over the whole batch
    sample_idx: np.ndarray  # [R] int32: which sample of the step (for sequence-level ratios)
    staleness: np.ndarray  # [R] int32: trainer version minus the version that sampled the token
    uids: tuple[str, ...]  # of the samples in it, to name them when a step is refused
    support: Support | None = None  # of the R targets; None: the whole vocabulary for all
    experts: np.ndarray | None = None  # [T, moe_layers, top_k] to replay, typed as in Completion
    minibatch: int = 0  # which of the optimizer steps on its batch learns from it

    __repr__ = _format_brief


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The data of one training step, which is an optimizer step for each of its ``minibatches``."""

    microbatches: tuple[Microbatch, ...]
    num_samples: int
    num_tokens: int  # trained tokens (rows of the loss)
    num_context_tokens: int  # forward rows without loss

    @property
    def minibatches(self) -> tuple[tuple[Microbatch, ...], ...]:
        """The data of each optimizer step, in order."""
        numbers = sorted({microbatch.minibatch for microbatch in self.microbatches})
        return tuple(
            tuple(microbatch for microbatch in self.microbatches if microbatch.minibatch == n)
            for n in numbers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one optimizer step; ``metrics`` use TRL's names where TRL has one."""

    metrics: Mapping[str, float]
    skipped: str = ""  # one sentence when a non-finite loss or gradient refused the step
    uids: tuple[str, ...] = ()  # the samples it names
    mismatch: Mapping[str, Any] | None = None  # a row of mismatch.jsonl, in steps that measure
    note: str = ""  # one sentence for a person, when something was decided


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftQuery:
    """The input of a drafter: S sequences that are about to run their last token.

    Depth d of a draft stands for the token at position (length of the sequence) + d of its request.
    """

    handles: np.ndarray  # [S] int64, from ``Drafter.open``
    room: np.ndarray  # [S] int32: most draft tokens that could still be emitted
    weights: np.ndarray  # [S] float32: worth of one token of it now, 1 for all while requests wait
    seconds: np.ndarray  # [N + 1] float64: what this pass takes with n draft tokens in it; N: most allowed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """Proposed tokens, sequence after sequence: each goes on with the one before it."""

    counts: np.ndarray  # [S] int32, tokens of each sequence
    tokens: np.ndarray  # [n] int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens:
    """The result of a pass: the tokens actually sampled, whatever was drafted, sequence after sequence."""

    handles: np.ndarray  # [S] int64
    counts: np.ndarray  # [S] int32; 0 for a sequence that was given up
    tokens: np.ndarray  # [n] int32
    probs: np.ndarray  # [n] float32, of the token under the distribution sampled from
    edges: np.ndarray  # [n] float32, see Completion
    ended: np.ndarray  # [S] bool: its handle is closed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryEntry:
    """A finished response as history keeps it."""

    context: np.ndarray  # [C] int32, the last tokens before it (a few are enough)
    tokens: np.ndarray  # [T] int32
    probs: np.ndarray  # [T] float32
    edges: np.ndarray  # [T] float32
    reward: float | None = None
