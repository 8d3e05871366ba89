"""Recorded answers: found by step without inflating a log, token by token, the same prompts side by side."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_run import answer, byte_renderer, golden
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.observe.samples import TOKENS_PER_ANSWER, Pieces, Samples, held_out_pairs, spread
from ostinato.render import Renderer
from ostinato.run import JsonlZst, group_rows
from ostinato.types import Group, Prompt, Trajectory, Turn


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return byte_renderer(tmp_path_factory.mktemp("tokens") / "tokenizer")


def log_step(log: JsonlZst, step: int, *trajectories: Trajectory, uid: str = "p") -> None:
    prompt = Prompt(uid=uid, text=f"question {step}", columns={"answer": "46"})
    log.append(*group_rows(Group(prompt=prompt, trajectories=trajectories, step=step)))


@pytest.fixture
def answers(tmp_path: Path) -> JsonlZst:
    """Steps 1 to 8, each with an answer that is right and one that is wrong."""
    log = JsonlZst(tmp_path / "trajectories.jsonl.zst")
    for step in range(1, 9):
        log_step(log, step, answer(f"It is {step}.", 1.0), answer("No idea", 0.25))
    return log


def opened(group: dict[str, Any]) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(group["data"])))


def test_every_row_of_the_log_is_in_a_group_of_its_step(answers: JsonlZst) -> None:
    samples = Samples(answers.path, None)
    assert samples.steps == list(range(1, 9))
    assert [row for step in samples.steps for rows in samples.groups(step) for row in rows] == list(
        answers.rows()
    )


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), min_size=1, max_size=3),
    st.integers(0, 40),
    st.booleans(),
)
def test_frames_of_any_size_and_a_torn_end(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, bool]], torn: int, checksum: bool
) -> None:
    """One block and several, incompressible and repeating ones, with and without a checksum."""
    import zstandard

    dice, writer = np.random.default_rng(0), zstandard.ZstdCompressor(write_checksum=checksum)
    bodies = [dice.bytes(size) if random else b"a" * size for size, random in parts]
    written = [writer.compress(b'{"step":%d,' % n + body) for n, body in enumerate(bodies)]
    last = writer.compress(b'{"step":99,"x":1}')
    path = tmp_path_factory.mktemp("frames") / "log.zst"
    path.write_bytes(b"".join(written) + last[:torn])
    samples = Samples(path, None)
    whole = torn >= len(last)
    assert len(samples.steps) == len(parts) + whole
    sizes = [frame.stop - frame.start for frame in samples._frames]
    assert sizes == [*map(len, written), *[len(last)] * whole]
    assert samples._unread == (0 if whole else torn)


@pytest.mark.slow  # half a gigabyte
def test_a_frame_that_grows_without_bound_is_not_expanded(tmp_path: Path) -> None:
    """The first bytes of a frame were expanded in full to read its step: 128 kB of input are up to 4 GB."""
    import zstandard

    writer = zstandard.ZstdCompressor(level=1).compressobj()
    row = [b'{"step":1,"x":"', *([b"a" * (1 << 23)] * 64), b'"}\n']
    (tmp_path / "log.zst").write_bytes(b"".join(map(writer.compress, row)) + writer.flush())
    samples = Samples(tmp_path / "log.zst", None)
    assert samples.steps == [] and samples.index()["groups"] == []


def test_new_frames_are_seen_and_a_replaced_log_is_read_anew(answers: JsonlZst) -> None:
    samples = Samples(answers.path, None)
    assert samples.index()["groups"][0]["preview"] == "question 8"
    log_step(answers, 9, answer("nine", 1.0))
    assert samples.index()["groups"][0]["step"] == 9 and samples.index(3)["groups"][0]["step"] == 3
    assert samples.index(3)["groups"][0]["rewards"] == [1.0, 0.25]
    with pytest.raises(ValueError, match="step 3 has no group 1"):
        samples.group(3, 1)
    answers.keep(lambda row: row["step"] < 3)
    log_step(answers, 3, answer("anew", None))
    assert samples.steps == [1, 2, 3] and samples.index(3)["groups"][0]["rewards"] == [None]
    answers.path.unlink()
    assert samples.index() == {"steps": [], "groups": []}


def test_the_same_prompts_stand_side_by_side(tmp_path: Path) -> None:
    run = golden(tmp_path / "run", 5)
    (pair,) = Samples(run.trajectories.path, None).pairs()  # the others are new in every step
    assert pair["same"] and pair["before"]["uid"] == pair["after"]["uid"] == "p1"
    assert (pair["before"]["step"], pair["after"]["step"]) == (1, 5)
    assert pair["before"]["text"] == "It is 5, says step 1." and pair["before"]["reward"] == 0.0
    assert pair["before"]["answer"] == "7"
    assert pair["after"]["text"] == "It is 7, says step 5." and pair["after"]["prompt"].startswith("3 + 4?")


def test_where_no_prompt_came_twice_other_ones_stand_side_by_side_and_say_so(answers: JsonlZst) -> None:
    answers.keep(lambda row: row["step"] in (1, 8))
    log_step(answers, 9, answer("nine", 1.0), uid="another")
    answers.keep(lambda row: row["step"] in (1, 9))
    (pair,) = Samples(answers.path, None).pairs()
    assert not pair["same"] and (pair["before"]["uid"], pair["after"]["uid"]) == ("p", "another")


def test_the_budget_is_kept_and_every_step_is_seen(tmp_path: Path) -> None:
    log, noise = JsonlZst(tmp_path / "trajectories.jsonl.zst"), np.random.default_rng(0)
    for step in range(1, 9):
        for index in range(4):
            words = "".join(map(chr, noise.integers(97, 122, 3000)))
            log_step(log, step, answer(words, 1.0), answer(words, 0.0), uid=f"p{index}")
    packed = Samples(log.path, None).packed(budget=50_000)
    assert sum(len(group["data"]) for group in packed["groups"]) <= 50_000
    assert {1, 8} <= {group["step"] for group in packed["groups"]}
    assert len(packed["groups"]) + packed["left_out"] == 32 and packed["recorded"] == list(range(1, 9))
    assert len(Samples(log.path, None).packed()["groups"]) == 32
    assert [sorted(spread(n)) for n in range(6)] == [list(range(n)) for n in range(6)]


def turns_of(tmp_path: Path, one: Trajectory) -> dict[str, Any]:
    log = JsonlZst(tmp_path / "trajectories.jsonl.zst")
    log_step(log, 1, one)
    (turn,) = opened(Samples(log.path, None).packed()["groups"][0])["answers"][0]["turns"]
    return turn


def test_what_was_put_in_is_shown_as_such(tmp_path: Path) -> None:
    """It has no log-probability: its 0 would have looked like certainty, and its version -1 like a policy."""
    one = answer("hi", 1.0)
    injected = np.array([False, True, True, False, False])
    versions = np.where(injected, -1, 3).astype(np.int32)
    experts = np.ones((5, 2, 3), np.int16)
    completion = replace(one.turns[0].completion, injected=injected, versions=versions, experts=experts)
    turn = turns_of(tmp_path, replace(one, turns=(replace(one.turns[0], completion=completion),)))
    assert (turn["injected"], turn["versions"]) == ([1, 2], [3])
    assert turn["logprobs"] == [-0.05, None, None, -1.5, -5.0]
    assert turn["routing"] == [2, 3] and turn["experts"] == [1] * 30


def test_overlong_answers_are_cut(tmp_path: Path) -> None:
    completion = replace(
        answer("long", 1.0).turns[0].completion,
        tokens=np.arange(3000, dtype=np.int32),
        logprobs=np.zeros(3000, np.float32),
        versions=np.zeros(3000, np.int32),
    )
    turn = turns_of(
        tmp_path, replace(answer("", 1.0), turns=(Turn(context=np.arange(2), completion=completion),))
    )
    assert turn["num_tokens"] == 3000 and len(turn["tokens"]) == TOKENS_PER_ANSWER


@settings(max_examples=40)
@given(text=st.text(max_size=30))
def test_pieces_join_to_the_text(text: str, tokenizer: Renderer) -> None:
    tokens: Sequence[int] = [int(token) for token in tokenizer.encode(text)]
    pieces = Pieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == text


def test_the_same_held_out_prompts_stand_before_and_after() -> None:
    """Training prompts of the first step seldom come again, so the page showed answers to others."""

    def row(step: int, *texts: str) -> dict[str, Any]:
        return {"step": step, "answers": [{"uid": str(k), "text": text} for k, text in enumerate(texts)]}

    assert held_out_pairs([row(0, "a")]) == held_out_pairs([{"step": 0}, row(5, "b")]) == []
    (one, two) = held_out_pairs([row(0, "a", "b"), {"step": 2}, row(4, "x", "y"), row(9, "c", "d")])
    assert one["same"] and (one["before"]["text"], one["after"]["text"]) == ("a", "c")
    assert (two["before"]["step"], two["after"]["step"], two["after"]["text"]) == (0, 9, "d")
