"""The world of forgetting, its baselines, its policy beside the memory it stands for, and loaders of
public data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.forgetting import contenders, world
from lab.forgetting.f1 import f1, score, stem
from lab.forgetting.meaning import Vectors, about, fitted
from lab.forgetting.measure import area, tally
from lab.forgetting.policy import FEATURES, Learning, Policy, Replay, Rules, State, learn, prepare, reward
from lab.forgetting.public import evidence_curves, locomo, longmemeval
from lab.forgetting.sense import Sense, learn_sense
from lab.forgetting.tokens import counter, tokenizer
from lab.forgetting.trained import Trained, remember
from lab.forgetting.words import WordPolicy, learn_words, written
from lab.paired import wilson
from ostinato.apps.memory.blocks import LEVELS


@cache
def count() -> Callable[[str], int]:
    return counter(tokenizer())


@cache
def vectors() -> Vectors:
    return fitted([world.history(at, count=count(), tokens=600) for at in range(20)])


def test_a_history_is_its_seed_and_its_questions_are_answered_by_their_evidence() -> None:
    for seed in range(10):
        found = world.history(seed, "eval", tokens=900, count=count())
        assert found == world.history(seed, "eval", tokens=900, count=count())
        assert 900 <= sum(count()(turn.line) for turn in found.turns) < 1000
        whole = [(turn, turn.line) for turn in found.turns]
        for question in found.questions:
            evidence = [(found.turns[at], found.turns[at].line) for at in sorted(question.evidence)]
            for lines in (whole, evidence):
                assert world.reply(question.chain, world.supported(lines, question.chain)) == question.answer
            assert (question.kind == "unanswerable") == (question.answer == world.UNKNOWN) == (not evidence)


def test_people_and_phrasings_of_an_evaluation_are_in_no_training() -> None:
    assert not set(world.names("train")) & set(world.names("eval"))
    texts = {
        split: {
            turn.text
            for seed in range(40)
            for turn in world.history(seed, split, tokens=400).turns
            if turn.fact
        }
        for split in ("train", "eval")
    }
    assert not texts["train"] & texts["eval"] - {
        text for text in texts["eval"] if text.split()[0] in ("ticket", "order")
    }


def test_every_word_of_the_world_is_a_token_and_a_name_is_two() -> None:
    made = tokenizer()
    for seed in range(6):
        found = world.history(seed, "eval", tokens=500, count=count())
        texts = [turn.line for turn in found.turns]
        texts += [f"{one.text} {one.answer}" for one in found.questions]
        for text in texts:
            ids = made.encode(f" {text}", add_special_tokens=False)
            assert made.decode(ids.ids) == f" {text}"
            marks = sum(char in ",:?!" for char in text)
            named = sum(word.strip(world.MARKS) in found.people for word in text.split())
            assert len(ids.ids) == len(text.split()) + marks + named


@cache
def sense() -> Sense:
    found = [world.history(at, count=count(), questions=60) for at in range(20)]
    words = WordPolicy(count())
    learn_words(words, found, 0, steps=1500)
    return learn_sense(words, found, 0)


def test_baselines_are_within_the_budget_and_retrieval_finds_the_evidence() -> None:
    found = world.history(2, "eval", tokens=800, count=count())
    for budget in (60, 100, 300):
        for make in (contenders.recency, contenders.uniform, contenders.overwrite):
            assert sum(count()(text) for _, text in make(found, budget, count())) <= budget
    dated = next(one for one in found.questions if one.kind == "temporal")
    for prepared in (contenders.bm25, contenders.by_hash, contenders.by_meaning(vectors())):
        order = prepared(found)(dated)
        assert sorted(order, key=lambda turn: turn.idx) == list(found.turns)
        lines = contenders.within(order, 300, count())
        assert sum(count()(text) for _, text in lines) <= 300
        assert set(dated.evidence) <= {turn.idx for turn, _ in lines}


def test_whom_a_line_is_about() -> None:
    assert about("Karo", "well, I married Mila") == "Karo"
    assert about("Karo", "so Mila reports to Tesa") == "Mila"
    assert about("tool", "ticket 12 owner Mila") == "12"
    assert about("Karo", "haha yes") == "Karo"


def test_full_context_is_right_and_the_tally_has_what_is_left() -> None:
    found = [world.history(at, "eval", tokens=500, count=count()) for at in range(3)]
    whole = tally(found, lambda one: lambda question: contenders.full(one, 0, count()), count())
    assert whole["accuracy"] == whole["evidence"] == 1.0 and whole["false"] == whole["unsupported"] == 0.0
    nothing = tally(found, lambda one: lambda question: [], count())
    assert nothing["evidence"] == 0.0 and nothing["kinds"]["unanswerable"] == 1.0
    assert nothing["accuracy"] == pytest.approx(nothing["kinds"]["unanswerable"] / 5, abs=0.05)


def test_area_and_interval() -> None:
    assert area([(128, 0.5), (256, 0.5), (1024, 0.5)]) == pytest.approx(0.5)
    assert area([(1, 0.0), (2, 1.0), (4, 1.0)]) == pytest.approx(0.75)
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4) and high == pytest.approx(
        0.9433, abs=1e-4
    )  # Newcombe's tables


def test_words_are_learnt_from_probes_alone() -> None:
    found = [world.history(at, count=count(), tokens=400, questions=40) for at in range(12)]
    policy = WordPolicy(count())
    rewards = learn_words(policy, found, 0, steps=800)
    assert rewards[-1] > rewards[0] + 0.1
    line = "by the way, I moved to Oslo, you know"
    text = policy("", line, "", 3)
    assert "Oslo" in text and count()(f"x: {text}") - count()("x:") <= 3
    roomy = policy("", line, "", 100)  # it stops where more is not worth its tokens
    assert roomy.split() == policy.kept(line) and len(roomy.split()) < len(line.split())


def test_what_a_later_line_replaces_is_learnt() -> None:
    """On people and phrasings that are not of training."""
    assert sense().subject("Karo", "as I said before, Mila reports to Tesa, you know") == "Mila"
    found: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(6):
        turns = world.history(seed, "eval", count=count(), tokens=900).turns
        for j, after in enumerate(turns):
            for before in turns[:j]:
                if before.fact and sense().subject(*_who(before)) == sense().subject(*_who(after)):
                    content = (sense().content(one.text) for one in (before, after))
                    key = before.fact.subject, before.fact.relation
                    same = after.fact is not None and key == (after.fact.subject, after.fact.relation)
                    found[same].append(sense().replaced(*content))
    shares = {same: np.mean(np.array(values) > 0.5) for same, values in found.items()}
    assert len(found[True]) > 20 and shares[True] > 0.6 and shares[False] < 0.1


def _who(turn: world.Turn) -> tuple[str, str]:
    return turn.speaker, turn.text


def _random_policy(seed: int) -> Policy:
    return Policy(np.random.default_rng(seed).normal(0.0, 1.0, (len(LEVELS), FEATURES)))


@pytest.mark.parametrize("seed", range(3))
def test_the_replay_is_the_memory_that_it_stands_for(seed: int) -> None:
    """Fast path and slow twin: the same turns in the same forms after every history."""
    words, policy = WordPolicy(count()), _random_policy(seed)

    for at in range(3):
        found = world.history(at, tokens=500, count=count())
        one, rules = prepare(found, count(), sense(), 4, partial(written, words)), Rules(budget=140)
        end = Replay(one, policy, rules).run(State(), len(found.turns))
        fast = [(found.turns[i], one.texts[i][end.level[i]]) for i in sorted(end.level)]
        held = remember(
            found, rules, count(), refiller=words, trained=Trained(policy, sense(), count(), rules)
        )
        assert fast == held.lines
        assert held.tokens <= 140


def test_learning_what_to_forget_beats_what_it_began_with() -> None:
    """Local groups: more probes are answered in a small world, at a budget of a quarter, than by age
    alone."""
    found = [world.history(at, count=count(), tokens=700, people=3, questions=40) for at in range(10)]
    ready = [prepare(one, count(), sense(), 4, None) for one in found]

    def right(policy: Policy) -> float:
        ends = [
            (one, Replay(one, policy, Rules(budget=175)).run(State(), len(one.found.turns))) for one in ready
        ]
        return float(np.mean([reward(one, end, 0.0, 0.0) for one, end in ends]))

    policy = learn(ready, lambda progress, rng, tokens: 175, 0, Learning(steps=120, starts=2, group=6))
    assert right(policy) > right(Policy()) + 0.1


# -- public data


@pytest.mark.parametrize(
    ("category", "prediction", "answer", "expected"),
    [
        (4, "The cats and a dog", "cat, dog", 1.0),  # articles, "and", commas and endings play no role
        (4, "blue", "red", 0.0),
        (4, "a blue car", "blue bicycle", 0.5),
        (1, "Paris, Rome", "Rome, Paris", 1.0),  # a list in any order
        (1, "Paris", "Rome, Paris", 0.5),
        (3, "likely yes", "Likely yes; she said so in May", 1.0),
        (4, "likely yes", "Likely yes; she said so in May", pytest.approx(4 / 9)),
        (5, "No information available.", "blue", 1.0),
        (5, "It is not mentioned", "", 1.0),
        (5, "blue", "blue", 0.0),
    ],
)
def test_official_scores(category: int, prediction: str, answer: str, expected: Any) -> None:
    assert score(category, prediction, answer) == expected


def test_stems_as_porter_published_them() -> None:
    pairs = "caresses:caress ponies:poni cats:cat agreed:agre plastered:plaster motoring:motor sing:sing"
    pairs += " conflated:conflat hopping:hop falling:fall filing:file happy:happi sky:sky relational:relat"
    pairs += (
        " conditional:condit triplicate:triplic hopeful:hope goodness:good adjustment:adjust adoption:adopt"
    )
    pairs += " probate:probat rate:rate controll:control roll:roll"
    assert [pair for pair in pairs.split() if stem(pair.split(":")[0]) != pair.split(":")[1]] == []
    assert f1("running dogs", "run dog") == 1.0


def _locomo(folder: Path) -> tuple[Path, dict[str, int]]:
    talk = {
        "speaker_a": "Ann",
        "speaker_b": "Bo",
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_1": [
            {"speaker": "Ann", "dia_id": "D1:1", "text": "I adopted a cat yesterday"},
            {
                "speaker": "Bo",
                "dia_id": "D1:2",
                "text": "Look",
                "img_url": ["x"],
                "blip_caption": "a red car",
            },
        ],
        "session_2_date_time": "2:00 pm on 9 June, 2023",
        "session_2": [{"speaker": "Ann", "dia_id": "D2:1", "text": "My cat is called Moon"}],
        "session_3_date_time": "3:00 pm on 9 June, 2023",
    }
    questions = [
        {"question": "What is the cat called?", "answer": "Moon", "evidence": ["D2:1"], "category": 4},
        {"question": "When adopted?", "answer": "7 May 2023", "evidence": ["D1:1; D9:9"], "category": 2},
        {"question": "Which dog?", "adversarial_answer": "Rex", "evidence": ["D1:1"], "category": 5},
    ]
    file = folder / "locomo.json"
    file.write_text(json.dumps([{"sample_id": "x", "conversation": talk, "qa": questions}]))
    counts = {
        "conversations": 1,
        "sessions": 2,
        "turns": 3,
        "words": 11,
        "turns with image": 1,
        "questions": 3,
    }
    return file, counts | {"single-hop": 1, "temporal": 1, "adversarial": 1, "only adversarial_answer": 1}


def test_locomo_is_checked_by_hash_and_counts(tmp_path: Path) -> None:
    file, counts = _locomo(tmp_path)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    data = locomo(file, counts, sha256)
    assert data.days == (("2023-05-08", "2023-05-08", "2023-06-09"),)
    assert [one.evidence for one in data.histories[0].questions] == [(2,), (0,), (0,)] and data.dangling == 1
    assert data.histories[0].turns[1].text == "Look [image: a red car]"
    with pytest.raises(ValueError, match="sha256"):
        locomo(file, counts)
    with pytest.raises(ValueError, match="has 3 turns where 4 are expected"):
        locomo(file, counts | {"turns": 4}, sha256)


def test_longmemeval_and_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"role": "user", "content": "My cat is called Moon", "has_answer": True}]
    talk += [{"role": "assistant", "content": f"Nice, number {at} of many words here"} for at in range(30)]
    record = {"question_type": "multi-session", "question": "What is the cat called?", "answer": "Moon"}
    record |= {"haystack_dates": ["2023/05/20 (Sat) 02:21"], "haystack_sessions": [talk]}
    file = tmp_path / "longmemeval.json"
    file.write_text(json.dumps([record]))
    counts = {"questions": 1, "multi-session": 1}
    data = longmemeval(file, counts)
    assert data.histories[0].questions[0].evidence == (0,) and set(data.days[0]) == {"2023-05-20"}
    monkeypatch.setattr("lab.forgetting.public.longmemeval", lambda file: longmemeval(file, counts))
    rows = evidence_curves("", str(file), (100,), lambda line: None)["rows"]
    of = {row["contender"]: row["evidence"] for row in rows if row["kind"] == "all"}
    assert of["BM25"] == 1.0 and of["recency"] == 0.0
