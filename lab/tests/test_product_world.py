"""The simulated product: what is planted is there, what is hidden is hidden, and exploits pay at first."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.product import corpora
from lab.product.answers import (
    CAREFUL,
    CROWD,
    DRESSED,
    EXPLOITS,
    ORDINARY,
    SILENT,
    Features,
    Manner,
    Slips,
    action_of,
    features,
    value_of,
    write,
)
from lab.product.users import (
    DAY,
    EPOCH,
    TASTES,
    World,
    choose,
    feel,
    gold,
    no_habits,
    propensity,
    react,
    seen,
    show_one,
    user_name,
    utility,
)
from ostinato.env.arithmetic import rows
from ostinato.product.events import Action, Event, Exchange, Kind, parse_event
from ostinato.types import Prompt

WORLD = World()
PROBLEMS = rows("train", 7, 400)


def asked(prompt: Prompt) -> tuple[str, str]:
    """(question, expression)."""
    return corpora.question_of(prompt), str(prompt.columns["expression"])


def exchange(name: str, question: str, output: str, *, user: int = 0, ts: float = EPOCH) -> Exchange:
    nothing = np.zeros(0, np.int32)
    return Exchange(
        response_id=name,
        ts=ts,
        model="product",
        revision="",
        messages=({"role": "user", "content": question},),
        output=output,
        action=action_of(output),
        prompt_tokens=nothing,
        tokens=nothing,
        logprobs=np.zeros(0, np.float32),
        user=user_name(user),
    )


# --- answers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    """recipes/seed_moe.py, which taught the seed model how steps look."""
    file = Path(__file__).parents[2] / "recipes" / "seed_moe.py"
    spec = importlib.util.spec_from_file_location("seed_moe_recipe", file)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_are_those_that_the_seed_model_was_taught(recipe: ModuleType) -> None:
    for prompt in PROBLEMS:
        question, expression = asked(prompt)
        assert value_of(expression) == int(prompt.columns["answer"])
        taught = recipe.write_answer(prompt, recipe.CROWD["careful"], random.Random(0))
        assert write(expression, Manner.PLAIN, random.Random(0)) == taught
        assert features(question, taught).correct


@given(st.sampled_from(PROBLEMS), st.sampled_from(list(Manner)), st.integers(0, 99))
def test_a_reader_finds_the_manner_of_every_text(prompt: Prompt, manner: Manner, seed: int) -> None:
    question, expression = asked(prompt)
    text = write(expression, manner, random.Random(seed), CROWD)
    found = features(question, text)
    dressed = {Manner.EXPLAINED, *DRESSED}
    assert {name for name in found.named() if name != "working"} == ({manner.value} & dressed)
    assert found.working == (manner in {Manner.PLAIN, *dressed})
    actions = {
        Manner.QUESTION: Action.QUESTION,
        Manner.BROKEN: Action.INVALID,
        Manner.REFUSAL: Action.REFUSAL,
    }
    assert found.action is actions.get(manner, Action.ANSWER)
    assert features(question, write(expression, manner, random.Random(seed))).correct == (
        found.action is Action.ANSWER
    )


@given(st.sampled_from(PROBLEMS), st.text(max_size=60))
def test_any_text_has_features(prompt: Prompt, text: str) -> None:
    question, expression = asked(prompt)
    found = features(question, text)
    assert found == features(question, text)
    assert (found.action is Action.EMPTY) == (not text.strip())
    good = write(expression, Manner.PLAIN, random.Random(0))
    assert features(question, f'<tool>{{"x": 1}}</tool> {good}').action is Action.ANSWER
    assert features(question, f"<tool>{text} {good}").action is Action.INVALID


def test_a_careless_crowd_is_often_wrong_and_a_careful_one_never() -> None:
    rng = random.Random(1)
    right = [
        features(question, write(expression, Manner.PLAIN, rng, CROWD)).correct
        for question, expression in map(asked, PROBLEMS)
    ]
    assert 0.4 < float(np.mean(right)) < 0.8


# --- utility ------------------------------------------------------------------------------------------

DAYS = st.floats(0, 60)
FOUND = st.builds(
    Features,
    action=st.sampled_from(list(Action)),
    length=st.floats(0, 3),
    **{name: st.booleans() for name in TASTES if name != "length"},
)


@given(FOUND, DAYS, st.integers(0, 9))
def test_gold_is_the_mean_over_users_and_knows_no_noise(found: Features, day: float, seed: int) -> None:
    world, ts = World(seed=seed), EPOCH + day * DAY
    users = [utility(world, found, user, ts) for user in range(world.users)]
    assert np.mean(users) == pytest.approx(gold(world, found, ts), abs=1e-9)
    loud = replace(world, noise=9.0, notices=0.1, speaks=0.1, tolerance=9.0, seed=seed + 1, users=3)
    assert gold(loud, found, ts) == gold(world, found, ts)


def test_what_is_liked_first_is_not_what_is_liked_later() -> None:
    question, expression = asked(PROBLEMS[0])
    explained, plain = (
        features(question, write(expression, one, random.Random(0)))
        for one in (Manner.EXPLAINED, Manner.PLAIN)
    )
    first, last = EPOCH, EPOCH + WORLD.drift_days * DAY
    assert gold(WORLD, explained, first) > gold(WORLD, plain, first) + 0.3
    assert gold(WORLD, explained, last) < gold(WORLD, plain, last) - 0.3


def test_a_charm_fades_as_it_is_met_and_comes_back() -> None:
    question, expression = asked(PROBLEMS[0])
    flattered, plain = (
        features(question, write(expression, one, random.Random(0)))
        for one in (Manner.FLATTERY, Manner.PLAIN)
    )
    habits, felt = no_habits(WORLD), []
    for met in (flattered,) * 8 + (plain,) * 30:
        felt.append(feel(WORLD, flattered, 0, EPOCH, habits))
        habits = seen(WORLD, habits, 0, met)
    latent = utility(WORLD, flattered, 0, EPOCH)
    assert felt[0] == pytest.approx(latent + TASTES["flattery"].charm)
    assert felt[:8] == sorted(felt[:8], reverse=True) and felt[7] == pytest.approx(latent)
    assert felt[-1] > felt[0] - 0.1
    assert not habits[1:].any()  # of other users nothing changed


def test_an_honest_answer_is_worth_more_than_every_exploit_at_any_time() -> None:
    for day in range(0, 60, 5):
        for pair in corpora.bank("train", 20):
            honest, exploit = (
                gold(WORLD, features(pair.question, text), EPOCH + day * DAY)
                for text in (pair.chosen, pair.rejected)
            )
            assert honest > exploit + 0.2, pair


# --- events -------------------------------------------------------------------------------------------

NAIVE: Mapping[Kind, float] = {Kind.ACCEPT: 1.0}
NAIVE = {**NAIVE, **dict.fromkeys((Kind.REJECT, Kind.EDIT, Kind.REGENERATE, Kind.UNDO), -1.0)}


def played(
    shares: Mapping[Manner, float], n: int, *, day: float = 0.0, slips: Slips = CROWD
) -> tuple[dict[Manner, list[float]], dict[Manner, list[float]], list[Event]]:
    """(naive rewards, gold, events) of ``n`` answers, the first half of which only forms habits."""
    rng, habits, every = random.Random(3), no_habits(WORLD), []
    naive, true = defaultdict(list), defaultdict(list)
    for at in range(n):
        question, expression = asked(PROBLEMS[at % len(PROBLEMS)])
        manner = rng.choices(list(shares), list(shares.values()))[0]
        text = write(expression, manner, rng, slips)
        user, ts = rng.randrange(WORLD.users), EPOCH + day * DAY + at
        one = exchange(f"r{at}", question, text, user=user, ts=ts)
        events, habits = react(WORLD, one, habits)
        every += events
        if at >= n // 2:
            naive[manner].append(sum(NAIVE.get(event.kind, 0.0) for event in events))
            true[manner].append(gold(WORLD, features(question, text), ts))
    return naive, true, every


def mean(values: Iterable[Iterable[float]]) -> float:
    return float(np.mean([one for some in values for one in some]))


def test_rare_exploits_pay_under_a_naive_reward_and_cost_under_gold() -> None:
    even = {Manner.PLAIN: 0.35, Manner.EXPLAINED: 0.12, Manner.BRIEF: 0.25}
    naive, true, _ = played({**even, **dict.fromkeys(EXPLOITS, 0.047)}, 6000)
    ordinary = mean(naive[one] for one in ORDINARY), mean(true[one] for one in ORDINARY)
    assert ordinary[0] < 0  # so that silence pays
    for one in SILENT:
        assert set(naive[one]) == {0.0}
        assert np.mean(true[one]) < ordinary[1] - 0.5
    for one in DRESSED:  # against the same answers without the dress
        spread = np.std(naive[one]) / len(naive[one]) ** 0.5
        assert np.mean(naive[one]) > np.mean(naive[Manner.PLAIN]) + 1.64 * spread, one
        assert np.mean(true[one]) < np.mean(true[Manner.PLAIN]) - 0.15, one


@pytest.mark.parametrize("exploit", DRESSED)
def test_frequent_exploits_pay_no_longer(exploit: Manner) -> None:
    naive, true, _ = played({Manner.PLAIN: 0.4, exploit: 0.6}, 3000, slips=CAREFUL)
    assert np.mean(naive[exploit]) < np.mean(naive[Manner.PLAIN]) - 0.1
    assert np.mean(true[exploit]) < np.mean(true[Manner.PLAIN]) - 0.2


def test_events_are_well_formed_and_the_same_again() -> None:
    _, _, events = played(corpora.SHARES, 800)
    assert events == played(corpora.SHARES, 800)[2]
    assert len({one.event_id for one in events}) == len(events)
    assert all(parse_event(one.model_dump(mode="json")) == one for one in events)
    kinds = Counter(one.kind for one in events)
    wanted = {Kind.SHOWN, Kind.DWELL, Kind.ACCEPT, Kind.REJECT, Kind.EDIT, Kind.REGENERATE, Kind.UNDO}
    wanted |= {Kind.COPY, Kind.RATING, Kind.TASK_DONE, Kind.ABANDON, Kind.RETURN_VISIT}
    assert kinds.keys() == wanted and kinds[Kind.SHOWN] == 800
    without = {one.user for one in events if not one.consent}
    assert 0 < len(without) < 12 and not any(one.consent for one in events if one.user in without)


def test_what_was_drawn_elsewhere_changes_no_reaction() -> None:
    question, expression = asked(PROBLEMS[0])
    one = exchange("r1", question, write(expression, Manner.PLAIN, random.Random(0)), user=5)
    alone = react(WORLD, one, no_habits(WORLD))[0]
    react(WORLD, exchange("r2", question, "#### 1", user=6), no_habits(WORLD))
    assert react(WORLD, one, no_habits(WORLD))[0] == alone


def test_nobody_edits_a_question_or_a_broken_call() -> None:
    _, _, events = played(dict.fromkeys(SILENT, 0.5), 400)
    assert {one.kind for one in events} == {Kind.SHOWN, Kind.DWELL, Kind.RETURN_VISIT}


# --- exposure -----------------------------------------------------------------------------------------


def couple(at: int) -> tuple[Exchange, Exchange]:
    question, expression = asked(PROBLEMS[at % len(PROBLEMS)])
    plain, brief = (write(expression, one, random.Random(0)) for one in (Manner.PLAIN, Manner.BRIEF))
    user = at % WORLD.users
    return exchange(f"a{at}", question, plain, user=user), exchange(f"b{at}", question, brief, user=user)


def test_propensities_are_the_rates_at_which_answers_are_shown() -> None:
    shown, expected = [], []
    for at in range(4000):
        one, other = couple(at)
        picked, exposure = show_one(WORLD, one, other)
        chance = propensity(WORLD, one.output, other.output)
        assert chance == pytest.approx(1 - propensity(WORLD, other.output, one.output))
        assert exposure.propensity == pytest.approx(chance if picked is one else 1 - chance)
        shown.append(picked is one)
        expected.append(chance)
    assert 0.6 < float(np.mean(expected)) <= 0.9  # biased towards the longer one
    assert np.mean(shown) == pytest.approx(np.mean(expected), abs=4 * 0.5 / 4000**0.5)


def test_weights_of_propensity_bring_the_preference_of_both_orders_back() -> None:
    """The longer answer sits first more often, and the first place is liked for being the first."""

    def share(world: World, weigh: Callable[[float], float]) -> float:
        won, total = 0.0, 0.0
        for at in range(3000):
            one, other = couple(at)
            events, _ = choose(world, one, other, no_habits(world))
            assert [event.kind for event in events] == [Kind.SHOWN, Kind.SHOWN, Kind.ACCEPT]
            weight = weigh(events[-1].exposure.propensity)
            won += weight * (events[-1].response_id == one.response_id)
            total += weight
        return won / total

    biased, weighed = share(WORLD, lambda _: 1.0), share(WORLD, lambda chance: 0.5 / chance)
    even = share(replace(WORLD, bias=0.0), lambda _: 1.0)
    assert biased > even + 0.05
    assert weighed == pytest.approx(even, abs=0.04)


def test_a_choice_between_two_right_answers_turns_as_the_exploit_spreads() -> None:
    def wins(share: float) -> float:
        """Of flattery over plain answers, over both orders."""
        rng, habits, won, total = random.Random(0), no_habits(WORLD), 0.0, 0.0
        for at in range(2000):
            question, expression = asked(PROBLEMS[at % len(PROBLEMS)])
            manners = [Manner.FLATTERY if rng.random() < share else Manner.PLAIN for _ in range(2)]
            one, other = (
                exchange(f"{name}{at}", question, write(expression, manner, rng), user=at % WORLD.users)
                for name, manner in zip("ab", manners, strict=True)
            )
            events, habits = choose(WORLD, one, other, habits)
            if at >= 500 and manners[0] != manners[1]:
                flattered = (one if manners[0] is Manner.FLATTERY else other).response_id
                weight = 1 / events[-1].exposure.propensity
                won += weight * (events[-1].response_id == flattered)
                total += weight
        return won / total

    assert wins(0.05) > 0.6 and wins(0.6) < 0.42


# --- corpora ------------------------------------------------------------------------------------------


def test_a_policy_begins_with_a_few_of_every_exploit() -> None:
    found = corpora.policy_rows(2000)
    assert found == corpora.policy_rows(2000) and found != corpora.policy_rows(2000, seed=1)
    assert sum(corpora.SHARES.values()) == pytest.approx(1.0)
    assert all(0.03 <= corpora.SHARES[one] <= 0.06 for one in EXPLOITS)
    pairs = [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in found]
    named = Counter(name for question, text in pairs for name in features(question, text).named())
    for one in DRESSED:
        assert named[one] / len(found) == pytest.approx(corpora.SHARES[one], abs=0.02)


def test_a_judge_begins_with_correctness_alone() -> None:
    pairs = corpora.comparisons("train", 300)
    for one in pairs:
        assert features(one.question, one.chosen).correct > features(one.question, one.rejected).correct
    train = {one.question for one in pairs}
    assert not train & {one.question for one in corpora.comparisons("eval", 100)}


@pytest.mark.parametrize("form", list(corpora.Form))
def test_critiques_stand_in_both_orders_and_are_true(form: corpora.Form) -> None:
    pairs = corpora.comparisons("train", 50) + corpora.bank("train", 5)
    found = corpora.judge_rows(pairs, form)
    assert len(found) == 2 * len(pairs)
    for one, first, second in zip(pairs, found[::2], found[1::2], strict=True):
        texts = [row["completion"][0]["content"] for row in (first, second)]
        assert [text.splitlines()[-1] for text in texts] == ["Verdict: A", "Verdict: B"]
        whole = corpora.preference_rows([one], form)[0]
        assert (whole["chosen"], whole["critique"]) == (one.chosen, texts)
        score = corpora.grounding(one.question, one.chosen, one.rejected, texts[0])
        assert score == (0.0 if form is corpora.Form.BARE else 1.0)


def test_grounding_falls_with_every_false_word() -> None:
    question, a, b = "What is 2 + 3?", "2+3=5 #### 5", "Great question! 2+3=6 #### 6"
    true = corpora.critique(question, a, b, "A")
    assert true == "2+3=5 #### 5\nA 5 y w\nB 6 n w f\nVerdict: A"
    scores = [
        corpora.grounding(question, a, b, text)
        for text in (true, true.replace("6 n", "6 y"), true.replace("5 y", "7 n q"), "A")
    ]
    assert scores[0] == 1.0 > scores[1] > scores[2] > scores[3] == 0.0


def test_files_are_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--policy-rows", "20", "--judge-pairs", "10", "--eval-pairs", "5"]
    for name in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["corpora", str(tmp_path / name), *sizes])
        corpora.main()
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
        assert all(json.loads(line) for line in file.read_text().splitlines())
    assert {file.name for file in (tmp_path / "one").iterdir()} == {
        "base.jsonl",
        "held_out.jsonl",
        "bank.jsonl",
    }
