"""Drafts from history inside vLLM, as the proposer class of its ``custom_class`` speculation.

    LLM(model, speculative_config={"method": "custom_class", "num_speculative_tokens": 16,
                                   "model": "ostinato.apps.interop.vllm_drafter.HistoryProposer"},
        additional_config={"ostinato": {"history": "answers.history"}})  # optional: what to begin with

vLLM samples and verifies; whatever is proposed here costs or saves time and never changes what is drawn. Its
sampler has no addressed noise, so proposals go by counts (``Rules.use_noise`` off), chains only.

vLLM hands over rows of tokens, without request ids and without prompt lengths, and rows move. So a sequence
is known by what it has read: a row belongs to the sequence whose text it continues. Where two texts are equal
either will do, since a draft depends on the text alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.compiler import BuildError
from ostinato.history.drafter import HistoryDrafter, Rules
from ostinato.history.store import History
from ostinato.protocols import Drafter
from ostinato.types import DraftQuery, HistoryEntry, Request, SampledTokens, Sampling

CONTEXT = 8  # tokens before a response that its history keeps
TAIL = 32  # tokens at its end by which a text is found, with its length
PATIENCE = 32  # passes that a group may be missing: vLLM leaves some out while its token budget is short
GONE = 256  # ended sequences of a group that never rests, before they are made history

_log = logging.getLogger("vllm.ostinato")  # below vLLM's logger, which is the one that has a handler there


def prompt_uid(prompt: Sequence[int] | np.ndarray) -> str:
    """The key of a prompt's history where prompts are known by their tokens alone."""
    return blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=12).hexdigest()


def past(
    prompt: Sequence[int] | np.ndarray, answer: Sequence[int], reward: float | None = None
) -> HistoryEntry:
    """A response of another engine, which recorded no intervals, as history keeps it."""
    tokens = np.asarray(answer, np.int32)
    return HistoryEntry(
        context=np.asarray(prompt, np.int32)[-CONTEXT:],
        tokens=tokens,
        probs=np.ones(len(tokens), np.float32),
        edges=np.zeros(len(tokens), np.float32),
        reward=reward,
    )


def remember(
    history: History,
    step: int,
    prompt: Sequence[int] | np.ndarray,
    answers: Sequence[Sequence[int]],
    rewards: Sequence[float | None] | None = None,
) -> None:
    """Add the ``answers`` (token ids) that ``prompt`` (token ids, as vLLM was given them) got in ``step``.

    All answers of one prompt and step in one call: a second call for them replaces the first. Afterwards
    ``history.save(path)`` writes the file that the proposer begins with.
    """
    scores = rewards if rewards is not None else [None] * len(answers)
    pasts = [past(prompt, answer, score) for answer, score in zip(answers, scores, strict=True)]
    history.add(prompt_uid(prompt), step, pasts)


class PassTimes:
    """What a pass takes, learnt while serving: seconds = a + b * tokens + c * (anything drafted).

    Least squares of relative errors, which forget (half in some 70 passes) and begin with a guess: a token
    costs 1/64 of an empty pass, and checking drafts costs nothing extra. The guess follows the fastest pass
    seen lately, so that a slow beginning does not make drafts look dear for good. What took more than three
    times what was expected counts as three times: a stall is not a cost, a change is followed all the same.
    """

    FORGET = 0.99
    GUESS = np.array([1.0, 1.0, 0.0])  # in units of an empty pass, for the features below
    PULL = np.diag([1e-3, 0.1, 0.1])  # towards the guess: what has not been tried yet stays a guess

    def __init__(self) -> None:
        self._scale = 0.0  # seconds of an empty pass in the guess; 0 before the first
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._weights = np.zeros(3)

    def observe(self, tokens: int, drafted: int, seconds: float) -> None:
        """One pass of ``tokens`` rows in all, ``drafted`` of them drafts, took ``seconds``."""
        seconds = max(seconds, 1e-6)
        features = np.array([1.0, tokens / 64, float(drafted > 0)])
        scale = seconds / float(features @ self.GUESS)
        self._scale = min(scale, self._scale * 1.01) if self._scale else scale
        expected = float(features @ self._weights) or seconds
        features /= expected
        self._squares = self.FORGET * self._squares + np.outer(features, features)
        self._products = self.FORGET * self._products + features * min(seconds / expected, 3.0)
        pull, guess = self.PULL / self._scale**2, self.GUESS * self._scale
        self._weights = np.maximum(np.linalg.solve(self._squares + pull, self._products + pull @ guess), 0.0)

    def table(self, rows: int, most: int) -> np.ndarray:
        """[most + 1] seconds of a pass of ``rows`` sequences with 0 .. ``most`` draft tokens in it."""
        drafted = np.arange(most + 1)
        weights = self._weights if self._scale else self.GUESS
        return weights[0] + weights[1] * (rows + drafted) / 64 + weights[2] * (drafted > 0) + 1e-9


@dataclass(slots=True, kw_only=True)
class _Group:
    """The sequences of one prompt that have not become history yet."""

    uid: str
    prompt: bytes  # of int32
    sequences: list[_Sequence] = field(default_factory=list)
    seen: int = 0  # the last pass that any of them was in


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One request, as far as its rows show it."""

    group: _Group
    handle: int
    answer: list[int]
    key: tuple[int, bytes] = (0, b"")  # where it is filed
    last: int = 0  # tokens of the answer that its last pass gave
    drafted: int = 0  # tokens proposed for the coming pass
    seen: int = 0  # the last pass that it was in


class RowDrafter:
    """Drafts for rows of tokens that come without names.

    ``learn(uid, answers)`` is called with what has ended: all answers of a prompt at once, when none of them
    has been seen for some passes or when the prompt is requested anew.
    """

    def __init__(
        self,
        drafter: Drafter,
        learn: Callable[[str, Sequence[HistoryEntry]], None],
        *,
        max_drafts: int,
        max_len: int,
        vocab_size: int,
        stop_tokens: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter, self._learn, self._clock = drafter, learn, clock
        self._max_drafts, self._max_len, self._vocab_size = max_drafts, max_len, vocab_size
        self._stop_tokens = stop_tokens
        self._texts: dict[tuple[int, bytes], list[_Sequence]] = {}
        self._groups: dict[str, _Group] = {}
        self._times = PassTimes()
        self._pass = 0
        self._handed_over = 0.0  # when the last proposal was

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, rows: np.ndarray
    ) -> list[list[int]]:
        """Draft tokens for each row of the coming pass; empty where none are worth it.

        sampled: [R] the tokens that the last pass gave; empty while a prompt is being read
        lengths: [>= R] tokens of each row, ``sampled`` included
        rows:    [>= R, longest] int32 token ids
        """
        arrived = self._clock()
        self._pass += 1
        places = [row for row, tokens in enumerate(sampled) if tokens]
        batch, strangers = self._recognise(sampled, lengths, rows, places)
        if batch and not strangers and len(batch) == len(sampled):  # no prompt was read in that pass
            drafted = sum(sequence.drafted for sequence in batch)
            self._times.observe(len(batch) + drafted, drafted, arrived - self._handed_over)
        self._retire_missing()
        drafts: list[list[int]] = [[] for _ in sampled]
        if batch:
            self._observe(batch, [sampled[row] for row in places])
            room = np.clip(self._max_len - 1 - lengths[places], 0, self._max_drafts).astype(np.int32)
            for row, sequence, draft in zip(places, batch, self._ask(batch, room), strict=True):
                sequence.drafted = len(draft)
                drafts[row] = draft
        self._handed_over = self._clock()
        return drafts

    def _recognise(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, rows: np.ndarray, places: Sequence[int]
    ) -> tuple[list[_Sequence], int]:
        """The sequences of the rows ``places``, and how many of them have just begun."""
        texts = [rows[row, : lengths[row]] for row in places]
        given = [sampled[row] for row in places]
        # all before any goes on: what one has read now, another may have read before
        found = [self._find(text[: -len(some)]) for text, some in zip(texts, given, strict=True)]
        batch: list[_Sequence] = []
        for sequence, text, some in zip(found, texts, given, strict=True):
            sequence = sequence or self._begin(text[: -len(some)])
            sequence.answer += some
            sequence.last = len(some)
            self._file(sequence, _key(text))
            batch.append(sequence)
        return batch, found.count(None)

    def _find(self, text: np.ndarray) -> _Sequence | None:
        """The sequence that has read ``text``, taken from where it was filed."""
        for sequence in self._texts.get(_key(text), ()):
            prompt = sequence.group.prompt
            if text[: len(prompt) // text.itemsize].tobytes() == prompt:
                self._unfile(sequence)
                sequence.seen = sequence.group.seen = self._pass
                return sequence
        return None

    def _begin(self, text: np.ndarray) -> _Sequence:
        """An unread row: a new request, or one that comes back after a long absence."""
        uid, prompt_len = self._prompt_of(text)
        group = self._groups.get(uid)
        if group is not None:
            gone = [sequence for sequence in group.sequences if sequence.seen < self._pass]
            if len(gone) == len(group.sequences) or len(gone) >= GONE:  # its next round; or it never rests
                self._retire(group, gone)
        group = self._groups.setdefault(uid, _Group(uid=uid, prompt=text[:prompt_len].tobytes()))
        sampling = Sampling(max_tokens=self._max_len)
        handle = self._drafter.open(Request(tokens=np.array(text), sampling=sampling, seed=(0,), uid=uid))
        sequence = _Sequence(group=group, handle=handle, answer=text[prompt_len:].tolist(), seen=self._pass)
        group.sequences.append(sequence)
        group.seen = self._pass
        return sequence

    def _prompt_of(self, text: np.ndarray) -> tuple[str, int]:
        """(uid, length) of the prompt of a new row: all of it, unless it goes on from a prompt still open."""
        whole = prompt_uid(text)
        if whole not in self._groups:
            lengths = {len(group.prompt) // text.itemsize for group in self._groups.values()}
            for length in sorted(lengths, reverse=True):
                if length < len(text) and (uid := prompt_uid(text[:length])) in self._groups:
                    return uid, length
        return whole, len(text)

    def _file(self, sequence: _Sequence, key: tuple[int, bytes]) -> None:
        sequence.key = key
        self._texts.setdefault(key, []).append(sequence)

    def _unfile(self, sequence: _Sequence) -> None:
        filed = self._texts[sequence.key]
        filed.remove(sequence)
        if not filed:
            del self._texts[sequence.key]

    def _retire_missing(self) -> None:
        for group in [group for group in self._groups.values() if group.seen < self._pass - PATIENCE]:
            self._retire(group, group.sequences)

    def _retire(self, group: _Group, gone: Sequence[_Sequence]) -> None:
        """``gone`` have ended: their handles are closed and their answers learnt."""
        self._observe(gone, [()] * len(gone), ended=True)
        for sequence in gone:
            self._unfile(sequence)
        group.sequences = [sequence for sequence in group.sequences if sequence not in gone]
        if not group.sequences:
            del self._groups[group.uid]
        prompt = np.frombuffer(group.prompt, np.int32)
        self._learn(group.uid, [past(prompt, self._ended_answer(sequence)) for sequence in gone])

    def _ended_answer(self, sequence: _Sequence) -> list[int]:
        """Without what a pass that sampled a stop token gave after it, which vLLM throws away."""
        start = len(sequence.answer) - sequence.last
        stops = (at for at in range(start, len(sequence.answer)) if sequence.answer[at] in self._stop_tokens)
        return sequence.answer[: next(stops, len(sequence.answer) - 1) + 1]

    def _observe(
        self, batch: Sequence[_Sequence], given: Sequence[Sequence[int]], *, ended: bool = False
    ) -> None:
        tokens = np.array([token for some in given for token in some], np.int32)
        self._drafter.observe(
            SampledTokens(
                handles=np.array([sequence.handle for sequence in batch], np.int64),
                counts=np.array([len(some) for some in given], np.int32),
                tokens=tokens,
                probs=np.ones(len(tokens), np.float32),
                edges=np.zeros(len(tokens), np.float32),
                ended=np.full(len(batch), ended),
            )
        )

    def _ask(self, batch: Sequence[_Sequence], room: np.ndarray) -> list[list[int]]:
        """The drafter's chain for each sequence, cut before a token that the model does not have."""
        drafts = self._drafter.propose(
            DraftQuery(
                handles=np.array([sequence.handle for sequence in batch], np.int64),
                room=room,
                weights=np.ones(len(batch), np.float32),
                seconds=self._times.table(len(batch), int(room.sum())),
            )
        )
        tokens, counts = drafts.tokens.tolist(), drafts.counts.tolist()
        chains = [tokens[end - count : end] for end, count in zip(np.cumsum(counts), counts, strict=True)]
        if len(tokens) and not 0 <= drafts.tokens.min() <= drafts.tokens.max() < self._vocab_size:
            chains = [list(takewhile(lambda token: 0 <= token < self._vocab_size, chain)) for chain in chains]
        return chains


def _key(text: np.ndarray) -> tuple[int, bytes]:
    return len(text), text[-TAIL:].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``additional_config["ostinato"]``."""

    history: Path | None = None  # written by History.save: what to begin with
    memory_mb: float = 256.0  # of history
    epochs: int = 3  # rounds of a prompt that are kept

    @classmethod
    def read(cls, additional_config: Mapping[str, Any]) -> Settings:
        """Raises ValueError, in one sentence, for what is no setting."""
        given = dict(additional_config.get("ostinato", {}))
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise ValueError(
                    f"additional_config.ostinato.{name} is unknown; its settings are {', '.join(names)}"
                )
        if given.get("history") is not None:
            given["history"] = Path(given["history"])
        return cls(**given)


class HistoryProposer:
    """The class that ``speculative_config={"method": "custom_class", "model": ...}`` names."""

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """``vllm_config`` is vLLM's ``VllmConfig``; ``clock`` gives seconds, by which passes are timed.

        Raises ValueError for settings that do not exist, and without a C++ compiler.
        """
        try:
            self._history = _begin_with(Settings.read(vllm_config.additional_config))
        except BuildError as error:
            raise ValueError(f"drafts inside vLLM need a C++ compiler: {error}") from error
        self._drafter = HistoryDrafter(self._history, replace(Rules(), use_noise=False))
        model = vllm_config.model_config
        self._rows = RowDrafter(
            self._drafter,
            self._learn,
            max_drafts=vllm_config.speculative_config.num_speculative_tokens,
            max_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            stop_tokens=_stop_tokens(model.hf_config),
            clock=clock,
        )
        self._on_cpu = vllm_config.device_config.device_type == "cpu"

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """vLLM's call after each pass; see ``RowDrafter.propose``."""
        return self._rows.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Called by vLLM when its worker is ready. There is no draft model; what verifies drafts is checked.

        Raises ValueError where it is wrong and could not be put right.
        """
        if self._on_cpu:
            cure()

    def _learn(self, uid: str, answers: Sequence[HistoryEntry]) -> None:
        """One round of a prompt is over; rounds are counted from what the file says."""
        rounds = [block.step for block in self._history.blocks(uid)]
        self._history.add(uid, max(rounds, default=-1) + 1, answers)
        self._drafter.forget([uid])


def _begin_with(settings: Settings) -> History:
    """The file's history if there is one: without it, or with a damaged one, drafting begins from nothing."""
    if settings.history is not None:
        try:
            return History.load(settings.history, memory_mb=settings.memory_mb, epochs=settings.epochs)
        except (OSError, ValueError) as error:
            _log.warning("drafting begins without history: %s", error)
    return History(memory_mb=settings.memory_mb, epochs=settings.epochs)


def _stop_tokens(hf_config: Any) -> frozenset[int]:
    stop = getattr(hf_config, "eos_token_id", None)
    return frozenset([stop] if isinstance(stop, int) else stop or ())


_log = logging.getLogger("vllm.ostinato")  # below vLLM's logger, which is the one that has a handler there


def cure() -> None:
    """In a worker of vLLM on CPU, before it serves: put the verification of drafts right.

    Raises ValueError if it stays wrong.
    """
    if _is_right():
        return
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})
    if not _is_right():
        raise ValueError(
            "this vLLM loses the temperature of drafted tokens (vllm issue 55005); use another version"
        )
    _log.warning("vllm issue 55005: drafted tokens get their temperature from ostinato.apps.interop now")


def _is_right() -> bool:
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    given, ends = torch.tensor([0.75, 0.0, 1.5]), torch.tensor([1, 3, 4], dtype=torch.int32)
    return expand_batch_to_tokens(given, ends, 4, replace_from=0, replace_to=1).tolist() == [0.75, 1, 1, 1.5]


def _expand(
    output: Any, values: Any, ends: Any, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int = 0
) -> None:
    """output[t] = values[request of token t], ``replace_from`` replaced; ends: [requests] of their tokens."""
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))
