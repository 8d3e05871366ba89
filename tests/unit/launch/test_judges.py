"""Judges as rewards: both orders, caches, ensembles, faults, the base that they share."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from commands import rows as lines
from hypothesis import given
from hypothesis import strategies as st
from nouns import completion
from product_rows import event, exchange

from ostinato.apps.product.events import Kind
from ostinato.apps.product.judge import Cache, Chat, Judge, Reply, Spec
from ostinato.apps.product.judge_runs import compute_figures, read_preferences, write_data
from ostinato.apps.product.judges import open_sources, pin_judges, write_spec
from ostinato.apps.product.judging import BothOrders, both_right
from ostinato.apps.product.panel import Bench, Panel
from ostinato.apps.product.store import open_store
from ostinato.config import Recipe
from ostinato.env.custom import EnvEpisode
from ostinato.launch.inputs import compute_stage_identity
from ostinato.launch.models import load_decoder
from ostinato.launch.trainer import new_adapters
from ostinato.model.decoder import Decoder
from ostinato.model.named import find_model_folder
from ostinato.model.peft_io import save_peft
from ostinato.render import Renderer
from ostinato.reward.workers import WorkerGrader
from ostinato.types import Group, NewRow, Prompt, Stop, Trajectory, Turn

CHAT = ({"role": "user", "content": "Which?"},)
PROMPT = Prompt(uid="p", messages=CHAT, columns={"answer": "four"})
A, B = re.compile(r"<answer_a>\n(.*)\n</answer_a>"), re.compile(r"<answer_b>\n(.*)\n</answer_b>")
Opinion = Callable[[str], str]


def first(text: str) -> str:
    return "Verdict: A"


def longer(text: str) -> str:
    a, b = A.findall(text)[0], B.findall(text)[0]
    return f"Verdict: {'tie' if len(a) == len(b) else 'A' if len(a) > len(b) else 'B'}"


class Written:
    """Implements judges.Writer: an opinion of each chat, and what it was requested."""

    def __init__(self, opinion: Opinion) -> None:
        self.opinion, self.seeds = opinion, dict[str, int]()

    async def write(self, chats: Sequence[Chat], seeds: Sequence[int], spec: Spec) -> list[Reply]:
        texts = [chat[0]["content"] for chat in chats]
        self.seeds |= dict(zip(texts, seeds, strict=True))
        return [Reply(text=self.opinion(text)) for text in texts]


def judge(opinion: Opinion, most: int = 1000, revision: str = "r") -> Judge:
    return Judge(Spec(model="m"), revision, Written(opinion), Cache(most), Counter())


def panel(*judges: Judge, timeout_s: float = 60.0) -> Panel:
    return Panel(judges, timeout_s=timeout_s, counters=Counter())


answers_of = st.lists(st.text("xy", min_size=1, max_size=6), min_size=2, max_size=7)


@given(st.lists(st.text("xy", min_size=1, max_size=6), min_size=2, max_size=6, unique=True))
def test_a_judge_of_positions_gives_no_reward_and_is_never_right(answers: list[str]) -> None:
    verdicts = asyncio.run(panel(judge(first)).score(PROMPT, answers))
    assert [(value, fault) for value, fault, _ in verdicts] == [(None, "inconsistent")] * len(answers)
    row = compute_figures(asyncio.run(judge(first).compare_each([(CHAT, answers[0], answers[1])])))
    assert row["accuracy"]["value"] == row["consistency"]["value"] == 0
    assert row["accuracy_ab"]["value"] == row["first"] == 1


@given(answers_of)
def test_win_rates_follow_the_answers_and_not_their_places(answers: list[str]) -> None:
    scores = asyncio.run(panel(judge(longer)).score(PROMPT, answers))
    n = len(answers)
    for i, (value, *_) in enumerate(scores):
        neighbours = {(i - 1) % n, (i + 1) % n} - {i}  # of the ring; all others where there are at most three
        wins = [
            1 if len(answers[i]) > len(answers[j]) else len(answers[i]) == len(answers[j]) and 0.5
            for j in neighbours
        ]
        assert value == pytest.approx(sum(wins) / len(neighbours))
    turned = asyncio.run(panel(judge(longer)).score(PROMPT, answers[::-1]))
    assert [value for value, *_ in turned[::-1]] == pytest.approx([value for value, *_ in scores])


@given(answers_of, st.integers(0, 4))
def test_a_cache_of_any_size_changes_no_verdict(answers: list[str], most: int) -> None:
    bare, cached = judge(longer, 0), judge(longer, most)
    once = asyncio.run(bare.score(CHAT, answers))
    for _ in range(2):
        assert asyncio.run(cached.score(CHAT, answers)) == once
    assert len(cached._cache._replies) <= most  # type: ignore[attr-defined]


def test_noise_is_addressed_by_revision_and_chat() -> None:
    """So a resumed run, whose cache is empty and whose batches differ, gets the same judgements."""
    answers = ["x", "xx", "xxx"]
    whole, apart, other = judge(longer, 0), judge(longer, 0), judge(longer, 0, revision="s")
    asyncio.run(whole.score(CHAT, answers))
    for pair in itertools.combinations(answers, 2):
        asyncio.run(apart.compare(CHAT, [pair]))
    asyncio.run(other.score(CHAT, answers))
    seeds = [one._writer.seeds for one in (whole, apart, other)]  # type: ignore[attr-defined]
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 6
    assert not {*seeds[0].values()} & {*seeds[2].values()}


def test_equal_chats_are_judged_once() -> None:
    numbers = itertools.count()
    one = judge(lambda text: str(next(numbers)))
    chat = [{"role": "user", "content": "?"}]
    assert [answer.text for answer in asyncio.run(one.ask([chat, chat]))] == ["0", "0"]
    assert one._counters["judge/cached"] == 1 and one._counters["judge/judgements"] == 2


def test_an_ensemble_is_a_mean_that_needs_all_its_judges() -> None:
    shorter = judge(lambda text: longer(text).translate(str.maketrans("AB", "BA")))
    both = panel(judge(longer), shorter)
    assert [v for v, *_ in asyncio.run(both.score(PROMPT, ["x", "xx"]))] == [0.5, 0.5]
    assert both._counters["judge/scored"] == 2 and both._counters["judge/variance"] == 0.5
    one_fails = panel(judge(longer), judge(lambda text: "neither"))
    (value, fault, detail), _ = asyncio.run(one_fails.score(PROMPT, ["x", "xx"]))
    assert (value, fault) == (None, "unreadable") and "neither" in detail


def test_an_answer_alone_is_compared_with_the_reference() -> None:
    assert asyncio.run(panel(judge(longer)).score(PROMPT, ["xxxxxx"])) == [(1.0, "", "")]
    without = Prompt(uid="p", messages=CHAT, columns={"answer": None})
    assert asyncio.run(panel(judge(longer)).score(without, ["x"])) == [(None, "", "")]


def test_a_judge_that_hangs_is_a_fault_by_name() -> None:
    class Never:
        async def write(self, chats: Sequence[Chat], seeds: Sequence[int], spec: Spec) -> list[Reply]:
            await asyncio.Event().wait()
            return []

    late = panel(Judge(Spec(model="m"), "r", Never(), Cache(1), Counter()), timeout_s=0.01)
    assert {fault for _, fault, _ in asyncio.run(late.score(PROMPT, ["x", "xx"]))} == {"timeout"}


def test_the_grader_adds_it_to_other_functions(tmp_path: Path) -> None:
    done = [completion([1], stop=Stop.EOS, text=text) for text in ("four", "xx")]
    played = [
        Trajectory(turns=(Turn(context=one.tokens, completion=one),), stop=Stop.EOS, seed=(0,))
        for one in done
    ]
    group, names = Group(prompt=PROMPT, trajectories=tuple(played), step=0), ["exact", "judge:j"]
    for opinion, expected in ((longer, [1.5, 0.0]), (first, [None, None])):
        with WorkerGrader(names, weights=[1.0, 0.5], scorers={"judge:j": panel(judge(opinion))}) as grader:
            rewards = asyncio.run(grader.grade(group))
        assert [one.value for one in rewards] == expected
        assert [one.parts["exact"] for one in rewards] == [1.0, 0.0]
    assert grader.counters == {"rewards/judge/inconsistent": 2}
    assert rewards[0].reason.startswith("inconsistent: judge: ")


# ---- names, folders, revisions


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(recipe().model, find_model_folder("asset:seed-moe"))


def recipe(*overrides: str) -> Recipe:
    return Recipe.load("quickstart", "model.dtype=float32", "engine.kv_memory_mb=16", *overrides)


@pytest.fixture
def folder(tmp_path: Path, decoder: Decoder) -> Path:
    adapters = new_adapters(recipe(), decoder)
    assert adapters is not None
    save_peft(adapters, decoder, tmp_path / "judge")
    write_spec(Spec(model="asset:seed-moe", template="{prompt} {a} {b}"), tmp_path / "judge")
    return tmp_path / "judge"


def test_a_revision_is_of_the_adapter_and_of_what_decides(folder: Path, tmp_path: Path) -> None:
    (found,) = open_sources(str(folder))
    assert found.adapter == folder and found.spec.template == "{prompt} {a} {b}"
    (folder / "judge.json").write_text(
        json.dumps({"model": "asset:seed-moe", "template": "{prompt} {a} {b}", "calibration": 2.0})
    )
    assert open_sources(str(folder))[0].revision == found.revision
    moved = folder.rename(tmp_path / "moved")
    assert open_sources(f"{moved}@{found.revision}")[0].revision == found.revision
    with pytest.raises(ValueError, match=f"is at revision {found.revision}, and 0123 is named"):
        open_sources(f"{moved}@0123")
    for wrong, match in (("template", "the template has fields"), ("form", "a judge compares two answers")):
        (moved / "judge.json").write_text(json.dumps({"model": "asset:seed-moe", wrong: "{a}"}))
        with pytest.raises(ValueError, match=match):
            open_sources(str(moved))


def test_a_whole_model_with_a_description_is_a_judge(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((find_model_folder("asset:seed-moe") / "config.json").read_bytes())
    write_spec(Spec(model="another", template="{prompt} {a} {b}"), tmp_path)
    (found,) = open_sources(str(tmp_path))
    assert found.adapter is None and found.spec == Spec(model=str(tmp_path), template="{prompt} {a} {b}")


def test_a_run_names_the_revisions_that_it_began_with(folder: Path) -> None:
    given = recipe(f'reward.functions=["exact", "judge:{folder},asset:seed-moe"]')
    fixed = pin_judges(given)
    one, other = fixed.reward.functions[1].removeprefix("judge:").split(",")
    assert one.startswith(f"{folder}@") and other.startswith("asset:seed-moe@")
    assert pin_judges(fixed) == fixed and compute_stage_identity(fixed) != compute_stage_identity(given)
    assert pin_judges(recipe()) == recipe()
    with pytest.raises(ValueError, match="no Hugging Face folder"):
        pin_judges(recipe('reward.functions=["judge:nowhere"]'))


def test_judges_share_the_base_and_not_their_adapters(folder: Path, decoder: Decoder) -> None:
    base = find_model_folder("asset:seed-moe")
    bench = Bench(recipe=recipe(), counters=Counter(), folder=base, decoder=decoder)
    names = (str(folder), "asset:seed-moe")
    found = [bench.judge(source) for name in names for source in open_sources(name)]
    ((timed, _),) = bench.engines.values()
    assert timed.engine.decoder is decoder and len(timed.engine.policies.numbers) == 2
    verdicts = [asyncio.run(one.compare(CHAT, [("x", "y")])) for one in found]
    assert bench.counters["judge/judgements"] == 4 and bench.counters["judge/seconds"] > 0
    assert bench.counters["judge/prompt_tokens"] > bench.counters["judge/tokens"] > 0
    assert all(reply.fault == "" for (one,) in verdicts for reply in one.replies)
    full = recipe('adapter.kind="full"', 'adapter.path=""')
    apart = Bench(recipe=full, counters=Counter(), folder=base, decoder=decoder)
    apart.judge(open_sources("asset:seed-moe")[0])
    assert next(iter(apart.engines.values()))[0].engine.decoder is not decoder


# ---- training


def pairs() -> Iterator[str]:
    for k in range(40):
        row = {
            "prompt": f"q{k // 2}",
            "chosen": f"good {k}",
            "rejected": "bad",
            "critique": "{chosen} is good work",
        }
        yield json.dumps(row) + "\n"


def test_data_has_both_orders_and_no_question_on_both_sides(tmp_path: Path) -> None:
    file, spec = tmp_path / "pairs.jsonl", Spec(model="asset:seed-moe", template="{prompt}|{a}|{b}")
    file.write_text("".join(pairs()))
    write_data(read_preferences(str(file)), spec, tmp_path / "data", 0.3)
    write_data(read_preferences(str(file)), spec, tmp_path / "again", 0.3)
    prompts = {}
    for split in ("train", "eval"):
        for kind in ("warm", "pairs"):
            path = f"{kind}/{split}.jsonl"
            assert (tmp_path / "data" / path).read_bytes() == (tmp_path / "again" / path).read_bytes()
        warm, rows = (lines(tmp_path / "data" / kind / f"{split}.jsonl") for kind in ("warm", "pairs"))
        prompts[split] = {row["prompt"][0]["content"].split("|")[0] for row in rows}
        assert len(warm) == 2 * len(rows)
        by_chat = {row["prompt"][0]["content"]: row["completion"][0]["content"] for row in warm}
        for row in rows:
            right, wrong = row["answer"], {"A": "B", "B": "A"}[row["answer"]]
            assert by_chat[row["prompt"][0]["content"]] == f"{right} is good work\nVerdict: {right}"
            assert by_chat[row["swapped"][0]["content"]] == f"{wrong} is good work\nVerdict: {wrong}"
    assert prompts["train"] and prompts["eval"] and not prompts["train"] & prompts["eval"]


def test_pairs_come_out_of_a_store_and_the_last_are_held_out(tmp_path: Path) -> None:
    file = str(tmp_path / "feedback.db")
    with pytest.raises(ValueError, match="there is no store"):
        read_preferences(file)
    with open_store(file) as store:
        for k in range(20):
            chat = ({"role": "user", "content": f"q{k}"},)
            answer = exchange(f"r{k}", 1000.0 + k, messages=chat, output="one two three", user=f"u{k}")
            of = {"user": f"u{k}", "consent": k != 3}
            edit = event(Kind.EDIT, f"r{k}", 1001.0 + k, after="one two four", **of)
            store.write([edit], [answer])
    found = read_preferences(file, holdout=0.2)
    assert {(one.chosen, one.rejected) for one in found} == {("one two four", "one two three")}
    prompts = {one.chat[0]["content"]: one.split for one in found}
    late = [name for name, side in prompts.items() if side == "eval"]
    assert len(prompts) == 19 and "q3" not in prompts
    assert late == [f"q{k}" for k in range(20 - len(late), 20)] and 3 <= len(late) <= 5


def test_the_pairs_of_a_single_user_are_parted_by_time(tmp_path: Path) -> None:
    """A single user of the chat page had 22 pairs and "none of 22 pairs is for eval"; thumbs alone, which are
    no pairs, had "no pair yet ({})"."""
    file = str(tmp_path / "feedback.db")
    with open_store(file) as store:
        for k in range(20):
            chat = ({"role": "user", "content": f"q{k}"},)
            answer = exchange(f"r{k}", 1000.0 + k, messages=chat, output="one two three", user="me")
            store.write([event(Kind.RATING, f"r{k}", 1001.0 + k, value=1, user="me")], [answer])
    with pytest.raises(
        ValueError, match=r"20 events on 20 answers in .* show no pair.* a thumb alone is none$"
    ):
        read_preferences(file, holdout=0.2)
    with open_store(file) as store:
        for k in range(20):
            store.write([event(Kind.EDIT, f"r{k}", 1002.0 + k, after="one two four", user="me")], [])
    sides = [one.split for one in read_preferences(file, holdout=0.2)]
    assert sorted(sides) == ["eval"] * 4 + ["train"] * 16


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"chosen": "a", "rejected": "b"}, "row 1 of .* has no 'prompt'"),
        ({"prompt": "q", "chosen": "a"}, "has no 'rejected'"),
        ({"prompt": "q", "chosen": "a ", "rejected": "a"}, "the same answer"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "critique": ["one"]}, "critique is a text or two"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(tmp_path: Path, row: dict[str, object], match: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=match):
        read_preferences(str(tmp_path / "rows.jsonl"))


def test_the_reward_needs_both_orders_and_weighs_critiques() -> None:
    def chat(*texts: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text} for text in texts]

    answers = [
        chat("Verdict: A", "Verdict: B"),
        chat("Verdict: A", "Verdict: A"),
        chat("Verdict: A"),
        chat("", ""),
    ]
    assert both_right(answers, ["A"] * 4) == [1.0, 0.0, 0.0, 0.0]
    critiques = [["The sum is wrong.", "The sum is wrong."]] * 2
    spoken = [
        chat("The sum is wrong.\nVerdict: B", "The sum is wrong.\nVerdict: A"),
        chat("Verdict: B", "Verdict: A"),
    ]
    assert both_right(spoken, ["B"] * 2, critiques) == [1.0, 0.5]


def test_the_other_order_is_a_conversation_of_its_own() -> None:
    renderer = Renderer(find_model_folder("asset:seed-moe"))
    swapped = [{"role": "user", "content": "B or A?"}]
    prompt = Prompt(uid="p", messages=({"role": "user", "content": "A or B?"},), columns={"swapped": swapped})
    episode = EnvEpisode(prompt, renderer, BothOrders, 2)
    asyncio.run(episode.open())
    assert renderer.decode(episode.start()).count("A or B?") == 1
    reply = asyncio.run(episode.step(completion([5], stop=Stop.EOS, text="Verdict: A")))
    assert isinstance(reply, NewRow) and reply.tokens.tolist() == renderer.chat(swapped).tolist()
    assert asyncio.run(episode.step(completion([5], stop=Stop.EOS, text="Verdict: B"))) is None
