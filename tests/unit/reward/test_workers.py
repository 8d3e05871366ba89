"""The grader's arithmetic and its sentences; real faults are in tests/e2e/test_reward_faults.py."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nouns import completion

from ostinato.reward.worker import Fault, TrainerState, describe_error, judge_completions
from ostinato.reward.workers import WorkerGrader
from ostinato.rollout.health import compute_health
from ostinato.types import Group, Prompt, Stop, Trajectory, Turn

REWARDS = '''
"""Rewards as a user writes them."""
import asyncio, os, struct, sys

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def sometimes(completions, **columns):
    return [None if text == "skip" else 1.0 for text in completions]

def echo(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(answer) == len(completions)
    return [float(sum(ids)) for ids in completion_ids]

def nan_for_b(completions, **columns):
    return [float("nan") if text == "b" else 1.0 for text in completions]

def short(completions, **columns):
    return [1.0]

def strict(completions, wanted):
    return [1.0 for _ in completions]

def needs_tags(completions, **columns):
    return [float(len(text.split("<answer>")[1])) for text in completions]

def wants_gold(completions, **columns):
    return [float(text == columns["gold"][0]) for text in completions]

def continued(prompts, completions, **columns):
    return [
        float(prompt[-1]["role"] == "user" and chat[0]["content"] == "The sum is 4")
        for prompt, chat in zip(prompts, completions)
    ]

def in_a_child(completions, end, **columns):
    """Judges each answer in a process of its own, as rewards do that run code."""
    scores = []
    for text in completions:
        if not (child := os.fork()):
            if end[0] == "returns":
                return [9.0] * len(completions)
            raise {"raises": ValueError, "exits": SystemExit}[end[0]](3)
        scores.append(10 * len(text) + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return scores

def forges(completions, frame, **columns):
    """Writes a reply itself, with the id of the request where the frame has one."""
    worker = next(f for f in frames() if "request" in f.f_locals and "sock" in f.f_locals)
    id_ = struct.unpack_from(">Q", worker.f_locals["request"])[0]
    payload = frame[0].replace("ID", str(id_)).encode()
    worker.f_locals["sock"].sendall(struct.pack(">Q", len(payload)) + payload)
    return [float(len(text)) for text in completions]

def frames():
    frame = sys._getframe()
    while frame := frame.f_back:
        yield frame

def logs(completions, log_metric, log_extra, trainer_state, **columns):
    log_metric("words", sum(map(len, completions)) / len(completions))
    log_metric("odd", float("nan"))
    log_extra("first", [text[:1] for text in completions])
    return [float(trainer_state.global_step)] * len(completions)

def asks_a_judge(completions, **columns):
    return [float(os.environ["JUDGE_API_KEY"] == "k")] * len(completions)

def wants_environments(completions, environments, **columns):
    return [1.0] * len(completions)

def prints(completions, **columns):
    print(completions[0])
    return [1.0 for _ in completions]

async def later(completions, **columns):
    return [2.0 for _ in completions]

async def meets(completions, place, **columns):
    """Waits for the call of another group."""
    open(os.path.join(place[0], completions[0]), "w").close()
    while len(os.listdir(place[0])) < 2:
        await asyncio.sleep(0.01)
    return [1.0 for _ in completions]
'''


def trajectory(*texts: str, stop: Stop = Stop.EOS) -> Trajectory:
    """One turn per text; context tokens are 10 each, answer tokens 1 each."""
    answer = [completion([1, 1, 1], stop=stop, text=text) for text in texts]
    turns = tuple(Turn(context=np.full(2, 10, np.int32), completion=one) for one in answer)
    return Trajectory(turns=turns, stop=stop, seed=(0,), error="boom" if stop is Stop.ERROR else "")


def group(*texts: str, **columns: Any) -> Group:
    prompt = Prompt(uid="p", text="What?", columns={"answer": "a", **columns})
    return Group(prompt=prompt, trajectories=tuple(trajectory(text) for text in texts), step=0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return str(path)


@pytest.fixture(scope="module")
def grader(file: str) -> Iterator[WorkerGrader]:
    names = ("length", "sometimes")
    with WorkerGrader([f"{file}:{name}" for name in names], weights=[0.5, 2.0]) as grader:
        yield grader


def values(grader: WorkerGrader, group: Group) -> list[float | None]:
    return [reward.value for reward in asyncio.run(grader.grade(group))]


def test_a_reward_is_the_weighted_sum_and_a_skipped_part_leaves_the_others(grader: WorkerGrader) -> None:
    rewards = asyncio.run(grader.grade(group("ab", "skip")))
    assert [reward.value for reward in rewards] == [0.5 * 2 + 2, 0.5 * 4]
    assert rewards[1].parts == {"length": 4.0, "sometimes": None}
    assert grader.counters["rewards/sometimes/skipped"] == 1


def test_a_task_of_a_mixture_has_its_own_judges(file: str) -> None:
    names = [f"{file}:{name}" for name in ("length", "strict")]
    with WorkerGrader(names, judges={"words": names[:1]}) as grader:
        other = group("ab")
        words = replace(other, prompt=replace(other.prompt, task="words"))
        assert values(grader, words) == [2.0] and not grader.check(words.prompt)
        assert values(grader, other) == [None]
        with pytest.raises(ValueError, match="reward strict does not take the row"):
            grader.check(other.prompt)


def test_the_same_grader_serves_several_event_loops_and_concurrent_groups(grader: WorkerGrader) -> None:
    async def both() -> list[list[float | None]]:
        graded = await asyncio.gather(*(grader.grade(group("a" * k)) for k in range(1, 5)))
        return [[reward.value for reward in rewards] for rewards in graded]

    assert asyncio.run(both()) == asyncio.run(both()) == [[0.5 * k + 2] for k in range(1, 5)]


def test_a_thought_that_was_cut_off_is_no_answer() -> None:
    """Where the prompt had opened the thought, its last number was graded as the answer: it paid not to
    finish."""
    cut, finished = (trajectory("First 5+5=10. Then two more give 12") for _ in range(2))
    cut = replace(cut, turns=(replace(cut.turns[0], in_thought=True),))
    both = replace(group("a", answer="12"), trajectories=(cut, finished))
    with WorkerGrader(["numeric"]) as grader:
        assert values(grader, both) == [0, 1]


def test_what_a_reward_prints_cannot_control_the_terminal(
    file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reward that prints an answer wrote the policy's escape sequences to the user's screen."""
    with WorkerGrader([f"{file}:prints"]) as grader:
        assert values(grader, group("\x1b]0;own\x07 \u202eabc")) == [1]
    assert r"\u001b]0;own\u0007 \u202eabc" in capfd.readouterr().err


def test_failed_episodes_are_not_judged(grader: WorkerGrader) -> None:
    mixed = Group(
        prompt=group("a").prompt,
        trajectories=(trajectory("a"), trajectory("a", stop=Stop.ERROR), trajectory("ab")),
        step=0,
    )
    rewards = asyncio.run(grader.grade(mixed))
    assert [reward.value for reward in rewards] == [2.5, None, 3.0]
    assert rewards[1].reason == "episode: error: boom"


def test_all_skipped_is_no_verdict(file: str) -> None:
    with WorkerGrader([f"{file}:sometimes"]) as grader:
        (reward,) = asyncio.run(grader.grade(group("skip")))
    assert (reward.value, reward.reason) == (None, "skipped")


def test_a_nan_is_a_fault_of_its_own_completion_only_and_is_never_left_out_of_a_sum(file: str) -> None:
    """With TRL's nansum a NaN part vanishes from the sum, which scores the fault 0."""
    with WorkerGrader([f"{file}:nan_for_b", f"{file}:length"]) as grader:
        a, b = asyncio.run(grader.grade(group("a", "b")))
        assert a.value == 2.0
        assert (b.value, b.reason) == (None, "non_finite: nan_for_b: nan")
        assert grader.counters == {"rewards/nan_for_b/non_finite": 1}


def test_columns_and_ids_are_trls_and_coroutines_are_awaited(file: str) -> None:
    with WorkerGrader([f"{file}:echo", f"{file}:later"]) as grader:
        two_turns = Group(prompt=group("a").prompt, trajectories=(trajectory("a", "b"),), step=0)
        assert values(grader, two_turns) == [
            3 + 2 * 10 + 3 + 2.0
        ]  # the tool's reply counts, the prompt does not


def test_coroutines_of_several_groups_wait_at_the_same_time(file: str, tmp_path: Path) -> None:
    """A reward that awaits a server took its second once for each group of a step: there was one process."""

    async def both() -> list[list[Any]]:
        groups = [group(text, place=str(tmp_path)) for text in ("a", "b")]
        return await asyncio.gather(*map(grader.grade, groups))

    with WorkerGrader([f"{file}:meets"], timeout_s=60, isolation="off") as grader:
        grader.check()
        assert [reward.value for rewards in asyncio.run(both()) for reward in rewards] == [1.0, 1.0]


def test_words_of_the_assistant_in_a_prompt_belong_to_its_answer(file: str) -> None:
    """As in TRL: a reward that judges whole answers would see only their second half."""
    chat = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The sum is"})
    begun = Group(prompt=Prompt(uid="p", messages=chat), trajectories=(trajectory(" 4"),), step=0)
    with WorkerGrader([f"{file}:continued"]) as grader:
        assert values(grader, begun) == [1.0]


def test_check_names_what_is_wrong_before_work_starts(file: str) -> None:
    for functions, sentence in [
        ([f"{file}:nothing"], "has no function 'nothing'"),
        (["exakt"], "nearest built-in is 'exact'"),
        ([f"{file}:short"], "short returned 1 values for 2"),
        ([f"{file}:strict"], "does not take the row"),
    ]:
        with WorkerGrader(functions) as grader, pytest.raises(ValueError, match=sentence):
            grader.check(group("a").prompt)


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ([1.0], Fault.WRONG_LENGTH),
        (None, Fault.WRONG_LENGTH),
        (1.0, Fault.WRONG_LENGTH),
        (["1", 1.0], Fault.NOT_A_NUMBER),
        ([[1.0], 1.0], Fault.NOT_A_NUMBER),
        ([math.inf, 1.0], Fault.NON_FINITE),
        ([math.nan, 1.0], Fault.NON_FINITE),
        ([10**400, 1.0], Fault.NOT_A_NUMBER),
    ],
)
def test_judge_names_every_bad_value(returned: Any, fault: Fault) -> None:
    verdicts, trace = judge_completions(lambda completions: returned, 2, {"completions": ["a", "b"]})
    assert verdicts[0][:2] == (None, fault) and not trace


def test_judge_takes_what_counts_as_numbers() -> None:
    assert [v for v, _, _ in judge_completions(lambda: np.array([1, 2]), 2, {})[0]] == [1.0, 2.0]
    assert [v for v, _, _ in judge_completions(lambda: [True, None, np.float32(0.5)], 3, {})[0]] == [
        1.0,
        None,
        0.5,
    ]


def test_judge_survives_whatever_is_raised() -> None:
    def leave() -> None:
        raise SystemExit(3)

    line = f" (test_workers.py:{leave.__code__.co_firstlineno + 1})"
    assert judge_completions(leave, 1, {})[0] == [(None, Fault.RAISED, f"SystemExit: 3{line}")]
    ((_, fault, detail),), trace = judge_completions(lambda: [1 / 0], 1, {})
    assert (fault, detail.partition(" (")[0]) == (Fault.RAISED, "ZeroDivisionError: division by zero")
    assert trace.startswith("Traceback (most recent call last):\n") and "worker.py" not in trace.replace(
        "test_workers.py", ""
    )
    assert trace.endswith("ZeroDivisionError: division by zero")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_of_any_text_can_be_written() -> None:
    """Half of a surrogate pair in it ended the run where the fault was printed; one whose text cannot be made
    ended the worker."""
    assert describe_error(ValueError("a\ud83d\nb")) == "ValueError: a\\ud83d b"
    assert describe_error(Unspeakable()) == "Unspeakable: its text cannot be made: RuntimeError"


def test_a_traceback_is_bounded_and_tells_what_led_to_it() -> None:
    """``raise RewardFailed from error`` is where many users' code ends: the line that matters is the first
    one's. A message of 50 MB or a deep recursion is no reason to send that much."""

    def deep(left: int) -> None:
        if not left:
            raise ValueError("x" * 10**6 + "\ud800")
        deep(left - 1)

    def wrapped() -> None:
        try:
            deep(300)
        except ValueError as error:
            raise RuntimeError("the judge is away") from error

    ((_, _, detail),), trace = judge_completions(wrapped, 1, {})
    assert detail.startswith("RuntimeError: the judge is away (test_workers.py:")
    assert trace.index("ValueError: xxx") < trace.index("RuntimeError: the judge is away")
    assert len(trace) < 20_000
    trace.encode()


def once(function: Any, **columns: Any) -> tuple[str, str]:
    """(fault, detail) of a dry run on one completion."""
    ((_, fault, detail), *_), _ = judge_completions(
        function, 1, {"completions": ["4"], **columns}, is_probing=True
    )
    return fault, detail


def test_a_dry_run_knows_what_no_completion_could_change() -> None:
    """Rewards with a missing column, a wrong name or a module that is not installed failed for every answer,
    and the run went to its end. What depends on the completion is no reason to refuse a function: real
    answers may have the tags that the dry run's lack."""

    def wants_gold(completions: Any, **columns: Any) -> list[float]:
        return [float(c == g) for c, g in zip(completions, columns["gold"], strict=True)]

    def fails_before_the_column(completions: Any, **columns: Any) -> list[float]:
        raise KeyError("answer")

    def tags(completions: Any, **columns: Any) -> list[float]:
        found = dict(re.findall("<(.*?)>(.*?)</", completions[0]))
        return [float(found["answer"])]

    def unguarded(completions: Any, **columns: Any) -> list[float]:
        match = re.search("FINAL: (.*)", completions[0])
        return [float(match.group(1))]  # type: ignore[union-attr]

    def misspelt(completions: Any, **columns: Any) -> list[float]:
        return [flaot(c) for c in completions]  # type: ignore[name-defined]  # noqa: F821

    def without_its_package(completions: Any, **columns: Any) -> list[float]:
        import no_such_package  # type: ignore[import-not-found]

        return no_such_package.score(completions)

    def runs_the_answer(completions: Any, **columns: Any) -> list[float]:
        return [float(eval("answer + 1", {}))]

    assert once(wants_gold)[0] == Fault.NO_COLUMN and "KeyError: 'gold' (test_wor" in once(wants_gold)[1]
    assert once(misspelt)[0] == once(without_its_package)[0] == Fault.UNDEFINED
    for unsure in (fails_before_the_column, tags, unguarded, runs_the_answer):
        assert once(unsure)[0] == Fault.RAISED
    assert once(lambda completions: [1.0], extra=[1])[0] == Fault.SIGNATURE


def test_the_dry_run_warns_refuses_and_shows_what_it_gave(file: str) -> None:
    row = group("a").prompt
    with WorkerGrader([f"{file}:{name}" for name in ("needs_tags", "sometimes", "length")]) as grader:
        (warning,) = grader.check(row)
    first, *rest = warning.splitlines()
    assert first.startswith("reward needs_tags gave no verdict on a dry run (raised: IndexError: ")
    assert rest[0] == "Traceback (most recent call last):" and "line" in rest[1]
    assert rest[-1] == "prompt p, completions ['a', '']"
    with WorkerGrader([f"{file}:wants_gold"]) as grader, pytest.raises(ValueError) as caught:
        grader.check(row)
    assert "wants_gold looks up a column that the row does not have (KeyError: 'gold' (mine.py:" in str(
        caught.value
    )
    assert "Traceback" in caught.value.__notes__[0] and "['a', '']" in caught.value.__notes__[0]


def test_a_failure_of_a_file_while_it_is_imported_has_its_line(tmp_path: Path) -> None:
    """A ValueError that the file raised was reported as if it were ours, without file and line."""
    path = tmp_path / "odd.py"
    path.write_text("import json\n\njson.loads('')\n")
    with (
        WorkerGrader([f"{path}:f"]) as grader,
        pytest.raises(ValueError, match=r"\(odd.py:3\); fix") as caught,
    ):
        grader.check()
    assert "odd.py" in caught.value.__notes__[0]


def test_a_verdict_carries_the_traceback_of_each_function_that_failed(file: str) -> None:
    with WorkerGrader([f"{file}:needs_tags", f"{file}:length"]) as grader:
        a, b = asyncio.run(grader.grade(group("a", "b")))
    assert a.reason.startswith("raised: needs_tags: IndexError: list index out of range (mine.py:")
    assert a.failed == b.failed and list(a.failed) == ["needs_tags"]
    head, second, *_ = a.failed["needs_tags"].splitlines()
    assert head.startswith("raised: IndexError: ") and second == "Traceback (most recent call last):"


@pytest.mark.parametrize(("end", "status"), [("raises", 1), ("exits", 3), ("returns", 0)])
def test_a_child_that_a_reward_forks_never_speaks_for_it(file: str, end: str, status: int) -> None:
    """A child that raised was caught as the worker would have been: it wrote a frame of its own and waited
    for requests at the same socket. From then on answers got the verdicts of others, and the run went on."""
    with WorkerGrader([f"{file}:in_a_child"], isolation="off") as grader:
        for texts in (("a", "bb"), ("ccc",), ("dddd", "e")):
            assert values(grader, group(*texts, end=end)) == [10 * len(text) + status for text in texts]
        assert not grader.counters


@pytest.mark.parametrize(
    "frame",
    [
        '[[[0.5, "", ""]], ""]',
        '{"id": 7, "verdicts": [[0.5, "", ""]], "trace": "", "metrics": {}, "extra": {}}',
        '{"id": ID, "verdicts": [[0.5, "", ""], [0.5, "", ""]], "trace": "", "metrics": {}, "extra": {}}',
        '{"id": ID, "verdicts": [[null, "x/../y", ""]], "trace": "", "metrics": {}, "extra": {}}',
        '{"id": ID, "verdicts": [[NaN, "", ""]], "trace": "", "metrics": {}, "extra": {}}',
        '{"id": ID, "verdicts": [[1, "raised", ""]], "trace": "", "metrics": {}, "extra": {}}',
        '{"id": ID, "verdicts": [["<b>", "", ""]], "trace": "", "metrics": {}, "extra": {}}',
        '{"id": ID, "verdicts": [[null, "", ""]], "trace": "", "metrics": {"a": 5}, "extra": {}}',
        "[" * 5000,
        "null",
    ],
)
def test_a_reply_that_does_not_fit_its_request_ends_the_worker(file: str, frame: str) -> None:
    """One frame that a reward wrote itself put all later verdicts of the run out of step; a fault was named
    as the frame said, and two verdicts for one answer were taken."""
    with WorkerGrader([f"{file}:forges", f"{file}:length"], isolation="off") as grader:
        (reward,) = asyncio.run(grader.grade(group("ab", frame=frame)))
        assert reward.value is None and reward.reason.startswith("died: forges: ")
        assert set(grader.counters) == {
            "reward_workers/died",
            "reward_workers/retried",
            "rewards/forges/died",
        }
        assert reward.parts["length"] == 2


def test_what_a_reward_logs_as_in_trl_comes_back_with_the_verdicts(file: str) -> None:
    """Functions that take TRL's log_metric, log_extra or trainer_state were refused: "add the column"."""
    with WorkerGrader([f"{file}:logs"], max_steps=9) as grader:
        assert not grader.check(group("a").prompt)
        first, second = asyncio.run(grader.grade(replace(group("ab", "cdef"), step=5)))
    assert first.value == second.value == 5.0
    assert first.metrics["words"] == second.metrics["words"] == 3.0 and math.isnan(first.metrics["odd"])
    assert (first.extra, second.extra) == ({"first": "a"}, {"first": "c"})
    figures = compute_health([replace(group("a"), trajectories=(replace(trajectory("a"), reward=first),))])
    assert figures["logged/words"] == 3.0


def test_what_trl_hands_to_rewards_and_we_do_not_is_refused_by_name(file: str) -> None:
    with (
        WorkerGrader([f"{file}:wants_environments"]) as grader,
        pytest.raises(ValueError, match="environments"),
    ):
        grader.check(group("a").prompt)
    state = TrainerState(global_step=1, max_steps=2)
    with pytest.raises(AttributeError, match="no epoch"):
        _ = state.epoch


def test_a_secret_that_isolation_keeps_back_is_named_with_the_way_to_get_it(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KeyError of os.environ was taken for a column that the row lacks."""
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    row = group("a").prompt
    with WorkerGrader([f"{file}:asks_a_judge"]) as grader, pytest.raises(ValueError) as caught:
        grader.check(row)
    assert "JUDGE_API_KEY" in str(caught.value) and "reward.isolation" in str(caught.value)
    assert "column" not in str(caught.value)
    with WorkerGrader([f"{file}:asks_a_judge"], isolation="off") as grader:
        assert not grader.check(row)
