"""Drafts from history inside vLLM, as the proposer class of its ``custom_class`` speculation.

    LLM(model, speculative_config={"method": "custom_class", "num_speculative_tokens": 16,
                                   "model": "ostinato.apps.interop.vllm_drafter.HistoryProposer"},
        additional_config={"ostinato": {"history": "answers.history"}})  # optional: a history to begin with

vLLM samples and verifies; proposals cost or save time and never change which tokens are drawn. Its sampler
has no addressed noise, so proposals go by counts (``Rules.use_noise`` off), chains only.

vLLM passes rows of tokens without request ids and prompt lengths, and rows move. So a sequence is identified
by its text: a row belongs to the sequence whose text it continues. Of two sequences with equal texts either
will do, since a draft depends on the text alone.
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

CONTEXT = 8  # tokens of the prompt that history keeps before a response
TAIL = 32  # tokens at the end of a text, which with its length are its key
MAX_MISSED = 32  # passes that a group may be missing: vLLM leaves some out while its token budget is short
MAX_ENDED = 256  # ended sequences after which a group that is never idle adds them to history

_log = logging.getLogger("vllm.ostinato")  # below vLLM's logger, which has a handler there


def prompt_uid(prompt: Sequence[int] | np.ndarray) -> str:
    """Return the key of a prompt in history: a hash of its tokens."""
    return blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=12).hexdigest()


def make_entry(
    prompt: Sequence[int] | np.ndarray, answer: Sequence[int], reward: float | None = None
) -> HistoryEntry:
    """Return a response of another engine, which recorded no intervals, in the form of history."""
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
    """Add to history the ``answers`` (token ids) to ``prompt`` (token ids, as vLLM was given them) in
    ``step``. Raises ValueError for another number of ``rewards`` than of answers.

    Give all answers of one prompt and step in one call, since a second call replaces the first. Afterwards
    ``history.save(path)`` writes the file that the proposer begins with.
    """
    scores = rewards if rewards is not None else [None] * len(answers)
    pasts = [make_entry(prompt, answer, score) for answer, score in zip(answers, scores, strict=True)]
    history.add(prompt_uid(prompt), step, pasts)


class PassTimes:
    """The time of a pass, learnt while serving: seconds = a + b * tokens + c * (anything drafted).

    It is a least-squares fit of relative errors, in which a pass loses half of its weight in some 70 passes.
    It begins with a guess: a token costs 1/64 of an empty pass, and verifying drafts costs nothing extra. The
    guess follows the fastest recent pass, so that a slow start does not make drafts look expensive forever. A
    time above three times the expected one counts as three times: the fit follows a change, but not a stall.
    """

    FORGET = 0.99
    GUESS = np.array([1.0, 1.0, 0.0])  # in units of an empty pass, for the features below
    PULL = np.diag([1e-3, 0.1, 0.1])  # towards the guess, which stays for what has not been measured yet

    def __init__(self) -> None:
        self._scale = 0.0  # seconds of an empty pass in the guess; 0 before the first
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._weights = np.zeros(3)

    def observe(self, tokens: int, drafted: int, seconds: float) -> None:
        """Record a pass of ``tokens`` rows in all, ``drafted`` of them drafts, that took ``seconds``."""
        seconds = max(seconds, 1e-6)
        features = np.array([1.0, tokens / 64, float(drafted > 0)])
        scale = seconds / float(features @ self.GUESS)
        self._scale = min(scale, self._scale * 1.01) if self._scale else scale
        expected_seconds = float(features @ self._weights) or seconds
        features /= expected_seconds
        self._squares = self.FORGET * self._squares + np.outer(features, features)
        self._products = self.FORGET * self._products + features * min(seconds / expected_seconds, 3.0)
        pull, guess = self.PULL / self._scale**2, self.GUESS * self._scale
        self._weights = np.maximum(np.linalg.solve(self._squares + pull, self._products + pull @ guess), 0.0)

    def predict_seconds(self, rows: int, max_drafts: int) -> np.ndarray:
        """Return [max_drafts + 1] seconds of a pass of ``rows`` sequences with 0 .. max_drafts draft
        tokens."""
        drafted = np.arange(max_drafts + 1)
        weights = self._weights if self._scale else self.GUESS
        return weights[0] + weights[1] * (rows + drafted) / 64 + weights[2] * (drafted > 0) + 1e-9


@dataclass(slots=True, kw_only=True)
class _Group:
    """The sequences of one prompt that are not in history yet."""

    uid: str
    prompt: bytes  # of int32
    sequences: list[_Sequence] = field(default_factory=list)
    last_pass: int = 0  # of the last one with any of them


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A request, as its rows show it."""

    group: _Group
    handle: int
    answer: list[int]
    key: tuple[int, bytes] = (0, b"")  # of its text in ``RowDrafter._texts``
    new_count: int = 0  # of answer tokens from its last pass
    drafted: int = 0  # tokens proposed for the coming pass
    last_pass: int = 0  # the last one that it was in


class RowDrafter:
    """Drafts for rows of tokens that have no names.

    ``learn(uid, answers)`` is called with the answers of ended sequences: with all of a prompt if none of
    them was in the last passes, or if the prompt is requested anew; with some of them if too many have ended.
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
        self._pass_count = 0
        self._proposal_time = 0.0  # time of the last proposal

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, rows: np.ndarray
    ) -> list[list[int]]:
        """Propose draft tokens for each row of the coming pass; none if they are not worth it. The call also
        records the tokens of the last pass and its time, and ends sequences that are missing for long.

        sampled: [R] the tokens from the last pass; empty while a prompt is being read
        lengths: [>= R] tokens of each row, ``sampled`` included
        rows:    [>= R, longest] int32 token ids
        """
        start = self._clock()
        self._pass_count += 1
        places = [row for row, tokens in enumerate(sampled) if tokens]
        batch, new_count = self._match_rows(sampled, lengths, rows, places)
        if batch and not new_count and len(batch) == len(sampled):  # no prompt was read in that pass
            draft_count = sum(sequence.drafted for sequence in batch)
            self._times.observe(len(batch) + draft_count, draft_count, start - self._proposal_time)
        self._retire_missing_groups()
        drafts: list[list[int]] = [[] for _ in sampled]
        if batch:
            self._report_tokens(batch, [sampled[row] for row in places])
            room = np.clip(self._max_len - 1 - lengths[places], 0, self._max_drafts).astype(np.int32)
            for row, sequence, draft in zip(places, batch, self._ask_drafter(batch, room), strict=True):
                sequence.drafted = len(draft)
                drafts[row] = draft
        self._proposal_time = self._clock()
        return drafts

    def _match_rows(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, rows: np.ndarray, places: Sequence[int]
    ) -> tuple[list[_Sequence], int]:
        """Return the sequences of the rows ``places``, with the sampled tokens added to them, and how many of
        them have just begun."""
        texts = [rows[row, : lengths[row]] for row in places]
        new_tokens = [sampled[row] for row in places]
        # Take all sequences before any is extended: the text of one row may be what another row had before.
        matches = [
            self._take_sequence(text[: -len(row_tokens)])
            for text, row_tokens in zip(texts, new_tokens, strict=True)
        ]
        batch: list[_Sequence] = []
        for sequence, text, row_tokens in zip(matches, texts, new_tokens, strict=True):
            sequence = sequence or self._begin_sequence(text[: -len(row_tokens)])
            sequence.answer += row_tokens
            sequence.new_count = len(row_tokens)
            self._add_text(sequence, _make_key(text))
            batch.append(sequence)
        return batch, matches.count(None)

    def _take_sequence(self, text: np.ndarray) -> _Sequence | None:
        """Remove the sequence with ``text`` from ``_texts``, mark it as present in this pass and return it;
        None without such a sequence."""
        for sequence in self._texts.get(_make_key(text), ()):
            prompt = sequence.group.prompt
            if text[: len(prompt) // text.itemsize].tobytes() == prompt:
                self._remove_text(sequence)
                sequence.last_pass = sequence.group.last_pass = self._pass_count
                return sequence
        return None

    def _begin_sequence(self, text: np.ndarray) -> _Sequence:
        """Begin a sequence for an unknown row: a new request, or one that comes back after a long absence.
        The sequences of the same prompt that have ended are retired if all have, or too many."""
        uid, prompt_len = self._find_prompt(text)
        group = self._groups.get(uid)
        if group is not None:
            ended_sequences = [
                sequence for sequence in group.sequences if sequence.last_pass < self._pass_count
            ]
            # The prompt begins its next round, or the group is never without a running sequence.
            if len(ended_sequences) == len(group.sequences) or len(ended_sequences) >= MAX_ENDED:
                self._retire_sequences(group, ended_sequences)
        group = self._groups.setdefault(uid, _Group(uid=uid, prompt=text[:prompt_len].tobytes()))
        sampling = Sampling(max_tokens=self._max_len)
        handle = self._drafter.open(Request(tokens=np.array(text), sampling=sampling, seed=(0,), uid=uid))
        sequence = _Sequence(
            group=group, handle=handle, answer=text[prompt_len:].tolist(), last_pass=self._pass_count
        )
        group.sequences.append(sequence)
        group.last_pass = self._pass_count
        return sequence

    def _find_prompt(self, text: np.ndarray) -> tuple[str, int]:
        """Return (uid, length) of the prompt of a new row: the longest open prompt that it continues, or all
        of it."""
        full_uid = prompt_uid(text)
        if full_uid not in self._groups:
            lengths = {len(group.prompt) // text.itemsize for group in self._groups.values()}
            for length in sorted(lengths, reverse=True):
                if length < len(text) and (uid := prompt_uid(text[:length])) in self._groups:
                    return uid, length
        return full_uid, len(text)

    def _add_text(self, sequence: _Sequence, key: tuple[int, bytes]) -> None:
        sequence.key = key
        self._texts.setdefault(key, []).append(sequence)

    def _remove_text(self, sequence: _Sequence) -> None:
        sequences = self._texts[sequence.key]
        sequences.remove(sequence)
        if not sequences:
            del self._texts[sequence.key]

    def _retire_missing_groups(self) -> None:
        for group in [
            group for group in self._groups.values() if group.last_pass < self._pass_count - MAX_MISSED
        ]:
            self._retire_sequences(group, group.sequences)

    def _retire_sequences(self, group: _Group, ended_sequences: Sequence[_Sequence]) -> None:
        """End sequences of a group: close their handles, forget them and learn their answers."""
        self._report_tokens(ended_sequences, [()] * len(ended_sequences), ended=True)
        for sequence in ended_sequences:
            self._remove_text(sequence)
        group.sequences = [sequence for sequence in group.sequences if sequence not in ended_sequences]
        if not group.sequences:
            del self._groups[group.uid]
        prompt = np.frombuffer(group.prompt, np.int32)
        self._learn(
            group.uid, [make_entry(prompt, self._trim_answer(sequence)) for sequence in ended_sequences]
        )

    def _trim_answer(self, sequence: _Sequence) -> list[int]:
        """Return the answer up to the first stop token of its last pass; vLLM discards the tokens behind
        it."""
        start = len(sequence.answer) - sequence.new_count
        stops = (
            position
            for position in range(start, len(sequence.answer))
            if sequence.answer[position] in self._stop_tokens
        )
        return sequence.answer[: next(stops, len(sequence.answer) - 1) + 1]

    def _report_tokens(
        self, batch: Sequence[_Sequence], new_tokens: Sequence[Sequence[int]], *, ended: bool = False
    ) -> None:
        tokens = np.array([token for row_tokens in new_tokens for token in row_tokens], np.int32)
        self._drafter.observe(
            SampledTokens(
                handles=np.array([sequence.handle for sequence in batch], np.int64),
                counts=np.array([len(row_tokens) for row_tokens in new_tokens], np.int32),
                tokens=tokens,
                probs=np.ones(len(tokens), np.float32),
                edges=np.zeros(len(tokens), np.float32),
                ended=np.full(len(batch), ended),
            )
        )

    def _ask_drafter(self, batch: Sequence[_Sequence], room: np.ndarray) -> list[list[int]]:
        """Return the drafter's chain for each sequence, cut before a token that is not in the vocabulary: a
        history from a file may have such tokens."""
        drafts = self._drafter.propose(
            DraftQuery(
                handles=np.array([sequence.handle for sequence in batch], np.int64),
                room=room,
                weights=np.ones(len(batch), np.float32),
                seconds=self._times.predict_seconds(len(batch), int(room.sum())),
            )
        )
        tokens, counts = drafts.tokens.tolist(), drafts.counts.tolist()
        chains = [tokens[end - count : end] for end, count in zip(np.cumsum(counts), counts, strict=True)]
        if len(tokens) and not 0 <= drafts.tokens.min() <= drafts.tokens.max() < self._vocab_size:
            chains = [list(takewhile(lambda token: 0 <= token < self._vocab_size, chain)) for chain in chains]
        return chains


def _make_key(text: np.ndarray) -> tuple[int, bytes]:
    return len(text), text[-TAIL:].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings from ``additional_config["ostinato"]``."""

    history: Path | None = None  # a file of History.save to begin with
    memory_mb: float = 256.0  # size of history
    epochs: int = 3  # rounds of a prompt that are kept

    @classmethod
    def read(cls, additional_config: Mapping[str, Any]) -> Settings:
        """Read the settings. Raises ValueError with one sentence for an unknown setting; values are not
        checked."""
        values = dict(additional_config.get("ostinato", {}))
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(
                    f"additional_config.ostinato.{name} is unknown; its settings are {', '.join(names)}"
                )
        if values.get("history") is not None:
            values["history"] = Path(values["history"])
        return cls(**values)


class HistoryProposer:
    """The proposer class that ``speculative_config={"method": "custom_class", "model": ...}`` names."""

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """``vllm_config`` is vLLM's ``VllmConfig``. ``clock`` returns seconds and times the passes.

        Raises ValueError for settings that do not exist, and without a C++ compiler.
        """
        try:
            self._history = _load_history(Settings.read(vllm_config.additional_config))
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
            stop_tokens=_get_stop_tokens(model.hf_config),
            clock=clock,
        )
        self._is_on_cpu = vllm_config.device_config.device_type == "cpu"

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Propose drafts by ``RowDrafter.propose``. vLLM calls this after each pass."""
        return self._rows.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Correct the verification of drafts on a CPU. vLLM calls this when its worker is ready. There is no
        draft model to load. Raises ValueError if the verification stays wrong."""
        if self._is_on_cpu:
            correct_verification()

    def _learn(self, uid: str, answers: Sequence[HistoryEntry]) -> None:
        """Add ended answers of a prompt to history as its next round, and drop what the drafter has cached of
        the prompt. The rounds of the file count too."""
        rounds = [block.step for block in self._history.blocks(uid)]
        self._history.add(uid, max(rounds, default=-1) + 1, answers)
        self._drafter.forget([uid])


def _load_history(settings: Settings) -> History:
    """Load the history of the file. Return an empty one without a file, and, with a warning, for a file that
    cannot be read."""
    if settings.history is not None:
        try:
            return History.load(settings.history, memory_mb=settings.memory_mb, epochs=settings.epochs)
        except (OSError, ValueError) as error:
            _log.warning("drafting begins without history: %s", error)
    return History(memory_mb=settings.memory_mb, epochs=settings.epochs)


def _get_stop_tokens(hf_config: Any) -> frozenset[int]:
    stop = getattr(hf_config, "eos_token_id", None)
    return frozenset([stop] if isinstance(stop, int) else stop or ())


_log = logging.getLogger("vllm.ostinato")  # below vLLM's logger, which has a handler there


def correct_verification() -> None:
    """Replace the kernel of vLLM that verifies drafts on a CPU, if it is wrong, and log that. Raises
    ValueError if the verification stays wrong."""
    if _is_verification_correct():
        return
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand_to_tokens})
    if not _is_verification_correct():
        raise ValueError(
            "this vLLM loses the temperature of drafted tokens (vllm issue 55005); use another version"
        )
    _log.warning("vllm issue 55005: drafted tokens get their temperature from ostinato.apps.interop now")


def _is_verification_correct() -> bool:
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    values, ends = torch.tensor([0.75, 0.0, 1.5]), torch.tensor([1, 3, 4], dtype=torch.int32)
    return expand_batch_to_tokens(values, ends, 4, replace_from=0, replace_to=1).tolist() == [0.75, 1, 1, 1.5]


def _expand_to_tokens(
    output: Any, values: Any, ends: Any, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int = 0
) -> None:
    """Set output[t] = values[request of token t], or ``replace_to`` for a value of ``replace_from``. ``ends``
    [requests] are the ends of the requests' tokens."""
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))
