"""The vLLM proposer without vLLM: rows that move, vanish and come back, as its runner hands them over."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.interop.vllm_drafter import (
    MAX_MISSED,
    HistoryProposer,
    PassTimes,
    RowDrafter,
    Settings,
    prompt_uid,
    remember,
)
from ostinato.history.store import History
from ostinato.types import DraftQuery, Drafts, HistoryEntry, Request, SampledTokens

LONGEST = 128
VOCAB = 50

Propose = Callable[[list[list[int]], np.ndarray, np.ndarray], list[list[int]]]


@dataclass
class Notes:
    """A drafter that notes what it observes and proposes what ``says`` says of a text."""

    says: Callable[[list[int]], list[int]] = lambda text: []
    texts: dict[int, list[int]] = field(default_factory=dict)
    uids: dict[int, str] = field(default_factory=dict)
    requested: list[int] = field(default_factory=list)  # handles of the last propose

    def open(self, request: Request) -> int:
        handle = len(self.uids)
        self.texts[handle], self.uids[handle] = request.tokens.tolist(), request.uid
        return handle

    def propose(self, running: DraftQuery) -> Drafts:
        self.requested = running.handles.tolist()
        rooms = running.room.tolist()
        output = [
            self.says(self.texts[handle])[:room] for handle, room in zip(self.requested, rooms, strict=True)
        ]
        return Drafts(
            counts=np.array([len(draft) for draft in output], np.int32),
            tokens=np.array([token for draft in output for token in draft], np.int32),
        )

    def observe(self, emitted: SampledTokens) -> None:
        ends = np.cumsum(emitted.counts)
        for at, handle in enumerate(emitted.handles.tolist()):
            self.texts[handle] += emitted.tokens[ends[at] - emitted.counts[at] : ends[at]].tolist()
            if emitted.ended[at]:
                del self.texts[handle]


@dataclass
class Engine:
    """What vLLM's V1 model runner does with its rows, over a model that is a function of the text.

    A request that ended leaves a hole, which the last row fills. Drafts are verified by sample-then-match.
    """

    model: Callable[[list[int]], int]
    texts: list[list[int]] = field(default_factory=list)  # by row
    drafts: list[list[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # length at which the row's request is over
    passes: int = 0
    seconds: float = 0.0  # 10 ms a pass and 0.1 ms a token
    drafted: int = 0
    accepted: int = 0
    done: list[list[int]] = field(default_factory=list)

    def add(self, prompt: Sequence[int], new_tokens: int) -> None:
        self.texts.append(list(prompt))
        self.drafts.append([])
        self.ends.append(len(prompt) + new_tokens)

    def remove(self, row: int) -> tuple[list[int], int]:
        """Take a row out and fill its hole with the last one."""
        text, end = self.texts[row], self.ends[row]
        for rows in (self.texts, self.drafts, self.ends):
            rows[row] = rows[-1]  # type: ignore[index]
            rows.pop()
        return text, end

    def step(self, propose: Propose | None) -> None:
        """One pass; without ``propose`` vLLM does not ask, as where a row is close to the longest length."""
        sampled = []
        for text, draft in zip(self.texts, self.drafts, strict=True):
            given = [self.model(text)]
            for token in draft:
                if token != given[-1]:
                    break
                given.append(self.model(text + given))
            self.drafted += len(draft)
            self.accepted += len(given) - 1
            text += given
            sampled.append(given)
        self.passes += 1
        self.seconds += 0.01 + 1e-4 * sum(1 + len(draft) for draft in self.drafts)
        lengths = np.zeros(len(self.texts) + 1, np.int32)  # vLLM's arrays are longer than the batch
        lengths[:-1] = [len(text) for text in self.texts]
        rows = np.full((len(self.texts) + 1, LONGEST), -7, np.int32)
        for row, text in enumerate(self.texts):
            rows[row, : len(text)] = text
        self.drafts = propose(sampled, lengths, rows) if propose else [[] for _ in sampled]
        for row in reversed(range(len(self.texts))):
            if len(self.texts[row]) >= self.ends[row]:
                self.done.append(self.remove(row)[0])


def drafter_of_rows(notes: Notes, learnt: list[tuple[str, list[list[int]]]] | None = None) -> RowDrafter:
    def learn(uid: str, answers: Sequence[HistoryEntry]) -> None:
        if learnt is not None:
            learnt.append((uid, [answer.tokens.tolist() for answer in answers]))

    return RowDrafter(notes, learn, max_drafts=4, max_len=LONGEST, vocab_size=VOCAB)


def hashed(text: list[int]) -> int:
    """A model of few words, so that siblings, loops and equal texts abound."""
    return random.Random(repr(text[-3:])).randrange(3)


@given(st.integers(0, 10_000))
def test_every_row_is_continued_by_a_sequence_that_has_read_it(seed: int) -> None:
    """Requests begin, end, are left out for some passes and come back in other rows; vLLM now and then does
    not ask. Whatever happened, the handle used for a row has read exactly the row's text."""
    rng = random.Random(seed)
    notes = Notes(says=lambda text: [hashed(text), rng.randrange(3)])
    rows, engine = drafter_of_rows(notes), Engine(hashed)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(3)]
    waiting: list[tuple[list[int], int]] = []
    shown: list[list[int]] = []

    def propose(sampled: list[list[int]], lengths: np.ndarray, table: np.ndarray) -> list[list[int]]:
        shown.extend(table[row, : lengths[row]].tolist() for row in range(len(sampled)))
        return rows.propose(sampled, lengths, table)

    for _ in range(40):
        if rng.random() < 0.5:
            engine.add(rng.choice(prompts), rng.randrange(1, 20))
        if engine.texts and rng.random() < 0.2:
            waiting.append(engine.remove(rng.randrange(len(engine.texts))))
        if waiting and rng.random() < 0.3:
            text, end = waiting.pop()
            engine.add(text, end - len(text))
        before = len(engine.texts)
        asks = bool(engine.texts) and rng.random() < 0.9
        shown.clear()
        engine.step(propose if asks else None)
        if asks:
            assert len(shown) == before
            assert [notes.texts[handle] for handle in notes.requested] == shown


def test_siblings_share_the_prompt_of_their_group_wherever_their_rows_go() -> None:
    notes = Notes()
    rows, engine = drafter_of_rows(notes), Engine(hashed)
    for prompt in ([1, 2, 3], [1, 2, 3], [2, 2, 2, 2]):
        engine.add(prompt, 9)
    engine.step(rows.propose)
    engine.remove(0)
    engine.step(rows.propose)
    assert list(notes.uids.values()) == [prompt_uid([1, 2, 3])] * 2 + [prompt_uid([2, 2, 2, 2])]
    assert notes.requested[0] == 2  # the last row filled the hole
    assert len(notes.requested) == 2 and len(notes.uids) == 3  # and nothing was opened twice


def test_prompts_that_differ_in_their_beginning_only_are_not_taken_for_one_another() -> None:
    """Chat templates end long prompts alike: by their last tokens two rows could not be distinguished, and
    one prompt's answers would have become the other's history."""
    notes, learnt = Notes(), []
    rows, engine = drafter_of_rows(notes, learnt), Engine(lambda text: 5)
    first, second = [1] + [9] * 40, [2] + [9] * 40
    engine.add(first, 10)
    engine.add(second, 12)
    for _ in range(3):
        engine.step(rows.propose)
    for kept in (engine.texts, engine.ends, engine.drafts):
        kept.reverse()
    for _ in range(3):
        engine.step(rows.propose)
    assert notes.requested == [1, 0]


def test_what_ended_is_learnt_once_and_whole_when_it_has_been_gone_for_a_while() -> None:
    learnt: list[tuple[str, list[list[int]]]] = []
    notes = Notes()
    rows, engine = drafter_of_rows(notes, learnt), Engine(hashed)
    engine.add([0], 100)  # keeps the engine running
    for prompt in ([1, 2], [1, 2], [2]):
        engine.add(prompt, 6)
    for _ in range(6 + MAX_MISSED):
        engine.step(rows.propose)
        assert not learnt
    engine.step(rows.propose)
    answers = {uid: sorted(tokens) for uid, tokens in learnt}
    assert len(learnt) == 2 and len(notes.texts) == 1
    assert answers[prompt_uid([1, 2])] == [text[2:] for text in engine.done if text[:2] == [1, 2]]
    assert answers[prompt_uid([2])] == [text[1:] for text in engine.done if text[:1] == [2]]


def test_a_prompt_asked_anew_closes_its_last_round_first() -> None:
    """Its answers are history when the second epoch begins, not some passes into it."""
    learnt: list[tuple[str, list[list[int]]]] = []
    rows, engine = drafter_of_rows(Notes(), learnt), Engine(hashed)
    for _ in range(2):
        engine.add([1, 2], 4)
        engine.add([1, 2], 5)
        while engine.texts:
            engine.step(rows.propose)
    assert [(uid, len(answers)) for uid, answers in learnt] == [(prompt_uid([1, 2]), 2)]


def test_what_a_pass_gave_after_a_stop_token_is_not_learnt() -> None:
    """vLLM verifies drafts that run over a stop token and then throws the rest away; learnt, the rest would
    be drafted in the next epoch, one token longer each time. A stop token that ended nothing stays."""
    learnt: list[list[int]] = []

    def learn(uid: str, answers: Sequence[HistoryEntry]) -> None:
        learnt.extend(answer.tokens.tolist() for answer in answers)

    def count(text: list[int]) -> int:
        return (text[-1] + 1) % 7

    rows = RowDrafter(
        Notes(says=lambda text: [count(text), count([*text, count(text)])]),
        learn,
        max_drafts=4,
        max_len=LONGEST,
        vocab_size=VOCAB,
        stop_tokens=frozenset([5]),
    )
    engine = Engine(count)
    engine.add([6], 20)
    while engine.texts:
        engine.step(rows.propose)
    engine.add([6], 1)
    engine.step(rows.propose)
    assert learnt == [[0, 1, 2, 3, 4, 5, 6] * 2 + [0, 1, 2, 3, 4, 5]]
    assert engine.done[0][-3:] == [5, 6, 0]


def test_drafts_end_before_the_longest_length_and_before_tokens_that_the_model_lacks() -> None:
    """A history of another tokenizer would otherwise index the embedding out of bounds."""
    says = [1, 2, 3, 4, 5]
    rows = RowDrafter(
        Notes(says=lambda text: says), lambda uid, answers: None, max_drafts=4, max_len=8, vocab_size=10
    )
    lengths = np.array([4, 5, 6, 7, 8])
    table = np.ones((5, 8), np.int32)
    sampled = [[1]] * 4 + [[1]]
    assert [len(draft) for draft in rows.propose(sampled, lengths, table)] == [3, 2, 1, 0, 0]
    says[1] = 10
    assert rows.propose([[], [1]], np.array([3, 5]), table) == [[], [1]]


@given(st.integers(0, 10_000), st.floats(1e-3, 1e-1), st.floats(0, 0.05), st.floats(0, 1))
def test_the_time_of_a_pass_is_learnt(seed: int, empty: float, token: float, check: float) -> None:
    """Where the law is linear the table is right, within the noise, wherever passes have been seen; it never
    says that a larger pass is faster."""
    rng, times = random.Random(seed), PassTimes()
    token, check = token * empty, check * empty
    for _ in range(300):
        rows = rng.randrange(1, 33)
        drafted = rng.choice([0, rng.randrange(1, 65)])
        seconds = empty + token * (rows + drafted) + check * (drafted > 0)
        times.observe(rows + drafted, drafted, seconds * rng.uniform(0.99, 1.01))
    table = times.predict_seconds(16, 64)
    truth = empty + token * (16 + np.arange(65)) + check * (np.arange(65) > 0)
    assert np.all(np.diff(table) >= 0)
    np.testing.assert_allclose(table, truth, rtol=0.1)


def test_a_stall_is_no_cost_and_a_change_is_followed() -> None:
    times = PassTimes()
    for _ in range(50):
        times.observe(8, 0, 0.01)
    times.observe(8, 0, 60.0)  # no request for a minute
    assert times.predict_seconds(8, 0)[0] < 0.011
    for _ in range(200):
        times.observe(8, 0, 0.03)
    assert times.predict_seconds(8, 0)[0] == pytest.approx(0.03, rel=0.2)


def test_a_slow_first_pass_does_not_make_drafts_dear_for_good() -> None:
    """It compiled something. Afterwards no pass with drafts would have been tried, and none ever timed."""
    times = PassTimes()
    times.observe(8, 0, 5.0)
    for _ in range(100):
        times.observe(8, 0, 0.01)
    table = times.predict_seconds(8, 8)
    assert table[0] == pytest.approx(0.01, rel=0.2)
    assert table[8] < 1.3 * table[0]


def test_before_the_first_pass_a_draft_token_is_cheap() -> None:
    """Nothing can be learnt about drafts without drafting."""
    table = PassTimes().predict_seconds(4, 64)
    assert table[64] < 2 * table[0]


def config(**settings: object) -> SimpleNamespace:
    """As much of vLLM's configuration as is read."""
    model = SimpleNamespace(
        max_model_len=LONGEST,
        get_vocab_size=lambda: VOCAB,
        hf_config=SimpleNamespace(eos_token_id=[VOCAB - 1]),
    )
    return SimpleNamespace(
        additional_config={"ostinato": settings} if settings else {},
        speculative_config=SimpleNamespace(num_speculative_tokens=8),
        model_config=model,
        device_config=SimpleNamespace(device_type="cuda"),
    )


def walk(seed: int) -> Callable[[list[int]], int]:
    """A model with an opinion of its own on every text of five tokens."""
    return lambda text: random.Random(repr((seed, text[-5:]))).randrange(VOCAB - 1)


def rounds(count: int, **settings: object) -> list[Engine]:
    """The same 8 prompts, 2 siblings each, ``count`` times over."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB - 1) for _ in range(6)] for _ in range(8)]
    engines = [Engine(walk(1)) for _ in range(count)]
    proposer = HistoryProposer(config(**settings), lambda: sum(engine.seconds for engine in engines))
    for engine in engines:
        for prompt in prompts * 2:
            engine.add(prompt, 60)
        while engine.texts:
            engine.step(lambda sampled, lengths, table: proposer.propose(sampled, lengths, table, None))
    return engines


def test_the_second_round_of_a_prompt_is_drafted_from_the_first() -> None:
    first, second = rounds(2)
    assert second.passes < 0.5 * first.passes
    assert second.accepted > 0.9 * second.drafted


def test_a_file_gives_the_first_round_what_was_remembered(tmp_path: Path) -> None:
    played = rounds(1)[0]
    history = History()
    by_prompt: dict[tuple[int, ...], list[list[int]]] = {}
    for text in played.done:
        by_prompt.setdefault(tuple(text[:6]), []).append(text[6:])
    for prompt, answers in by_prompt.items():
        remember(history, 0, prompt, answers)
    history.save(tmp_path / "past")
    again = rounds(1, history=str(tmp_path / "past"))[0]
    assert again.passes < 0.5 * played.passes


@pytest.mark.parametrize("content", [None, b"no history"])
def test_without_a_readable_file_drafting_begins_from_nothing(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A history saves time and nothing else: losing it must not stop the server."""
    if content is not None:
        (tmp_path / "past").write_bytes(content)
    rounds(1, history=str(tmp_path / "past"))
    assert "drafting begins without history" in caplog.text


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"additional_config\.ostinato\.memory is unknown; .* memory_mb"):
        Settings.read({"ostinato": {"memory": 3}})


def test_importing_the_proposer_loads_no_torch() -> None:
    """It is imported by vLLM's processes, before and beside their own torch."""
    import subprocess
    import sys

    code = "import sys, ostinato.apps.interop.vllm_drafter; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
