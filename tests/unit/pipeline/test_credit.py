"""What a step makes of its groups: credit, the compute that they need, what drafts were of use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nouns
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import completion, episode
from nouns import group_of as group
from small_loop import TEN_A_ROW, Bench, FakeMemory

from ostinato.algo.algorithms import algorithm
from ostinato.model.flops import Work
from ostinato.pipeline.account import compute_rollout_work
from ostinato.pipeline.credit import Credit, assign_credit
from ostinato.pipeline.draft_metrics import CONTEXT, collect_answers, count_drafts
from ostinato.rollout.health import count_sampled_tokens
from ostinato.types import Completion, Group, Prompt, Reward, Stop, Trajectory, Turn


def member(reward: float | None, length: int = 4, stop: Stop = Stop.EOS, routed: bool = False) -> Trajectory:
    routes = [np.zeros((rows, 1, 1), np.int16) if routed else None for rows in (length, 2)]
    return episode(completion(length, stop=stop, experts=routes[0], prompt_experts=routes[1]), reward=reward)


def credit(
    groups: Sequence[Group],
    name: str,
    weights: Mapping[str, float] = MappingProxyType({}),
    **overrides: object,
) -> Credit:
    chosen = algorithm(name, **overrides)
    return assign_credit(groups, chosen, min_verdicts=2, answer_tokens=10, reward_weights=weights)


def test_advantages_reach_the_tokens() -> None:
    made = credit([group(member(1, 2), member(0, 4))], "dr_grpo")
    assert [sample.advantages.tolist() for sample in made.samples] == [[0, 0, 0.5, 0.5], [0, 0] + [-0.5] * 4]
    assert [weight.tolist() for weight in made.weights] == [[0, 0, 0.05, 0.05], [0, 0] + [0.05] * 4]
    assert not made.wasted_tokens and not made.dropped_groups
    assert [numbers.tolist() for numbers in made.advantages] == [[0.5, -0.5]]
    masked = credit(
        [group(member(1, 1), member(0, 2), member(0, 3, Stop.LENGTH))], "grpo", mask_truncated=True
    )
    assert np.isnan(masked.advantages[0]).tolist() == [False, False, True]


def test_the_names_of_the_waste() -> None:
    made = credit(
        [
            group(member(1, 1), member(0, 2), member(0, 3, Stop.LENGTH)),
            group(member(1, 4), member(0, 5), member(None, 6), member(None, 7, Stop.ERROR)),
            group(member(1, 8), member(1, 9)),
            group(member(1, 10), member(None, 11)),
            group(member(0, 12, Stop.ERROR), member(0, 13, Stop.ERROR)),
        ],
        "grpo",
        drop_zero_variance=True,
        mask_truncated=True,
    )
    assert [sample.uid for sample in made.samples] == ["p#0", "p#1", "p#0", "p#1"]
    assert made.wasted_tokens == {
        "truncated": 3,
        "no_verdict": 6,
        "failed": 7 + 12 + 13,
        "zero_variance": 17,
        "too_few_verdicts": 21,
    }
    assert made.dropped_groups == {"zero_variance": 1, "too_few_verdicts": 1, "too_few_episodes": 1}


def test_distillation_trains_on_all_that_was_played() -> None:
    """Whatever the verdicts; the teacher writes the advantages, and a reward is added where there is one."""
    groups = [group(member(None, 1), member(1, 2), member(None, 3, Stop.ERROR)), group(member(1, 4))]
    made = credit(groups, "opd")
    assert [sample.uid for sample in made.samples] == ["p#0", "p#1", "p#0"]
    assert not any(sample.advantages.any() for sample in made.samples)
    assert made.wasted_tokens == {"failed": 3} and not made.dropped_groups
    mixed = credit([group(member(1, 1), member(0, 2))], "opd", reward_coef=0.5)
    assert [sample.advantages[-1] for sample in mixed.samples] == [0.25, -0.25]


def test_a_truncated_member_is_part_of_the_baseline_though_not_trained_on() -> None:
    made = credit([group(member(1), member(0), member(0, 4, Stop.LENGTH))], "dr_grpo", mask_truncated=True)
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx([2 / 3, -1 / 3])


def test_overlong_answers_pay_before_they_are_compared() -> None:
    """DAPO's soft punishment over the last 2 of 10 tokens: rewards 1, 0.5, 0 from equal verdicts."""
    made = credit([group(member(1, 8), member(1, 9), member(1, 10))], "dapo")
    assert [sample.uid for sample in made.samples] == ["p#0", "p#2"]
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx([1, -1], abs=1e-3)
    assert made.wasted_tokens == {"zero_advantage": 9}


def test_the_length_penalty_of_scalerl_is_for_solved_answers_alone() -> None:
    """Eq. 9, L_max 10, L_cache 4: rewards of 1 fall by 1/4 a token from 6 on, those of -1 stay."""
    answers = [member(1, 6), member(1, 8), member(1, 12), member(-1, 8), member(-1, 12)]
    options = {"overlong_buffer": 0.4, "scale": "none", "aggregation": "sample"}
    wanted = np.array([1, 0.5, 0, -1, -1])
    made = credit([group(*answers)], "dapo", overlong_scope="solved", **options)
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx(wanted - wanted.mean())
    everyone = np.array([1, 0.5, 0, -1.5, -2])
    made = credit([group(*answers)], "dapo", **options)
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx(everyone - everyone.mean())


def scored(**parts: float | None) -> Trajectory:
    given = [value for value in parts.values() if value is not None]
    reward = Reward(value=sum(given) if given else None, parts=parts)
    return replace(member(0, 1), reward=reward)


def test_rewards_compared_apart_tell_answers_of_one_sum_apart() -> None:
    """One of form and one of value, each had once: the sum is the same, so nothing was learned."""
    groups = [group(scored(a=1, b=0), scored(a=0, b=1), scored(a=0, b=1))]
    assert not credit(groups, "grpo").samples
    made = credit(groups, "grpo", weights={"a": 1.0, "b": 0.5}, rewards="apart")
    assert [np.sign(sample.advantages[-1]) for sample in made.samples] == [1, -1, -1]
    flat = [group(scored(a=1, b=1), scored(a=1, b=1))]
    drops = credit(flat, "dapo", weights={"a": 1.0, "b": 0.5}, rewards="apart")
    assert drops.dropped_groups == {"zero_variance": 1}


def test_groups_without_variance_keep_their_share_of_the_denominator() -> None:
    """Plain GRPO averages over all samples; skipping those without gradient must not amplify the others."""
    mixed = group(member(1), member(0))
    alone, beside = credit([mixed], "grpo"), credit([mixed, group(member(1), member(1))], "grpo")
    assert len(beside.samples) == 2 and beside.wasted_tokens == {"zero_advantage": 8}
    for a, b in zip(alone.weights, beside.weights, strict=True):
        np.testing.assert_allclose(b, a / 2)


def test_with_a_kl_term_a_zero_advantage_still_has_a_gradient() -> None:
    made = credit([group(member(1), member(1))], "grpo", kl_coef=0.1)
    assert len(made.samples) == 2 and not made.wasted_tokens


def test_samples_without_routes_are_left_out_beside_routed_ones() -> None:
    made = credit([group(member(1, routed=True), member(0))], "grpo")
    assert [sample.uid for sample in made.samples] == ["p#0"] and made.wasted_tokens == {"no_routes": 4}


OUTCOMES = st.tuples(
    st.sampled_from([0.0, 1.0, 0.5, None]),
    st.integers(1, 9),
    st.sampled_from([Stop.EOS, Stop.LENGTH, Stop.ERROR]),
)


@given(
    outcomes=st.lists(st.lists(OUTCOMES, min_size=2, max_size=4), min_size=1, max_size=4),
    name=st.sampled_from(["grpo", "dapo", "cispo", "rloo", "reinforce_pp", "gspo"]),
    mask_truncated=st.booleans(),
)
def test_tokens_are_conserved(outcomes: list, name: str, mask_truncated: bool) -> None:
    groups = [group(*(member(*outcome) for outcome in members)) for members in outcomes]
    made = credit(groups, name, mask_truncated=mask_truncated)
    trained = sum(int(sample.loss_mask.sum()) for sample in made.samples)
    sampled = sum(count_sampled_tokens(t) for g in groups for t in g.trajectories)
    assert trained + made.wasted_tokens.total() == sampled
    assert all(np.isfinite(sample.advantages).all() for sample in made.samples)
    assert sum(weight.sum() for weight in made.weights) <= 1 + 1e-9
    for sample, weight in zip(made.samples, made.weights, strict=True):
        assert (weight[~sample.loss_mask] == 0).all()


# ---- the compute axis C of a run in FLOPs: what its recipe requires, whatever the engine made of it


COUNTS = st.integers(0, 3)
TURN = st.tuples(st.lists(COUNTS, min_size=1, max_size=4), st.lists(st.booleans(), max_size=4))
GROUP = st.lists(st.lists(TURN, max_size=3), max_size=4)


def answer(injected: Sequence[bool], **of_the_engine: Any) -> Completion:
    return completion(len(injected), injected=np.array(injected, bool), **of_the_engine)


def group_of(episodes: Sequence[Sequence[tuple[Sequence[int], Sequence[bool]]]]) -> Group:
    trajectories = tuple(
        Trajectory(
            turns=tuple(
                Turn(context=np.array(text, np.int32), completion=answer(marks)) for text, marks in turns
            ),
            stop=Stop.EOS,
            seed=(),
        )
        for turns in episodes
    )
    return Group(prompt=Prompt(uid="p", text="p"), trajectories=trajectories, step=1)


def row_by_row(group: Group) -> Work:
    """The slow twin. An episode runs each of its positions once, up to the one before its last token; a
    sibling finds what it has in common with the first context of the first, but for its own last token."""
    work, begun = Work(), None
    for trajectory in group.trajectories:
        position = 0  # of the next row
        end = 0  # of the text so far
        for turn in trajectory.turns:
            if end == 0:
                text = turn.context.tolist()
                if begun is not None:
                    while position < min(len(begun), len(text) - 1) and begun[position] == text[position]:
                        position += 1
                begun = begun or text
            end += len(turn.context) + len(turn.completion.tokens)
            last = end - 1 if len(turn.completion.tokens) else end
            while position < last:
                work += Work(1, position + 1, 0)
                position += 1
            work += Work(0, 0, len(turn.completion.tokens) - turn.completion.num_injected)
    return work


@given(st.lists(GROUP, max_size=3))
def test_nothing_is_run_twice(episodes: list[Any]) -> None:
    groups = [group_of(one) for one in episodes]
    assert compute_rollout_work(groups) == sum(map(row_by_row, groups), Work())


@given(GROUP, st.data())
def test_it_is_a_function_of_the_tokens(episodes: list[Any], data: st.DataObject) -> None:
    """Of two runs of one recipe, with the same losses to the last bit, one had spent 3.60e10 FLOPs after five
    steps and the other 3.26e10: C had the refused drafts in it, whose number is a matter of measured time,
    and what a cold prefix cache did again. So a resumed run was scored, and ended itself, at other steps."""

    def otherwise(turn: Turn) -> Turn:
        counts = {name: data.draw(COUNTS) for name in ("cached_tokens", "drafted", "accepted", "passes")}
        spans = np.array([[0, data.draw(COUNTS)]], np.int32)
        return replace(turn, completion=replace(turn.completion, recomputed=spans, **counts))

    group = group_of(episodes)
    again = replace(
        group,
        trajectories=tuple(
            replace(one, turns=tuple(map(otherwise, one.turns))) for one in group.trajectories
        ),
    )
    assert compute_rollout_work([again]) == compute_rollout_work([group])


def test_drafts_move_no_evaluation(tmp_path: Path) -> None:
    """Two runs of one recipe, of which one drafts and fails, reach the same C, by which they are scored."""
    plain = Bench(tmp_path / "plain", steps=4, flops=TEN_A_ROW, eval_every="3e3 flops")
    drafts = Bench(
        tmp_path / "drafts", steps=4, flops=TEN_A_ROW, eval_every="3e3 flops", drafting=FakeMemory()
    )
    for bench in (plain, drafts):
        bench.run()
    ours, theirs = ([row["total/compute_flops"] for row in bench.rows] for bench in (plain, drafts))
    assert ours == theirs
    spent = [
        [(row["step"], row["spent"]["flops"]) for row in bench.folder.eval.rows()]
        for bench in (plain, drafts)
    ]
    assert spent[0] == spent[1] and [flops for _, flops in spent[0]][-1] == ours[-1]


# ---- drafts in a run: what is remembered, what is counted, and that neither can change a token


def guessed(tokens: Sequence[int], **changes: Any) -> Completion:
    size = len(tokens)
    probs = {"logprobs": np.full(size, np.log(0.25), np.float32), "edges": np.full(size, 0.5, np.float32)}
    return nouns.completion(tokens, **{**probs, "passes": size, **changes})


def siblings(uid: str, *answers: Completion, step: int = 1) -> Group:
    """Siblings of one turn each, rewarded 0, 1, 2 ..."""
    played = (nouns.episode(answer, reward=float(k), stop=Stop.EOS) for k, answer in enumerate(answers))
    return nouns.group_of(*played, uid=uid, step=step)


# -- what is remembered


def test_each_turn_is_kept_behind_the_end_of_all_before_it() -> None:
    """Two turns: the second's context is the end of prompt, first answer and reply together."""
    prompt, reply = np.arange(100, 120, dtype=np.int32), np.array([7, 8], np.int32)
    turns = (
        Turn(context=prompt, completion=guessed([1, 2, 3])),
        Turn(context=reply, completion=guessed([4, 5])),
    )
    episode = Trajectory(turns=turns, stop=Stop.EOS, seed=(0,), reward=Reward(value=0.5))
    kept, num_skipped = collect_answers(
        [Group(prompt=Prompt(uid="a", text="?"), trajectories=(episode,), step=1)]
    )
    first, second = kept["a"]
    whole = [*prompt, 1, 2, 3, 7, 8]
    assert first.context.tolist() == prompt[-CONTEXT:].tolist() and first.tokens.tolist() == [1, 2, 3]
    assert second.context.tolist() == whole[-CONTEXT:] and second.tokens.tolist() == [4, 5]
    assert first.probs.tolist() == pytest.approx([0.25] * 3) and first.edges.tolist() == [0.5] * 3
    assert (first.reward, second.reward, num_skipped) == (0.5, 0.5, 0)


def test_what_cannot_be_searched_by_noise_is_counted_and_left_out() -> None:
    """Another engine gives no edges, and the numbers of a failed answer may be broken."""
    groups = [siblings("a", guessed([1]), guessed([2], edges=None), guessed([3], stop=Stop.ERROR))]
    kept, num_skipped = collect_answers(groups)
    assert [past.tokens.tolist() for past in kept["a"]] == [[1]] and num_skipped == 2


# -- what is counted


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_counts_are_sums_over_answers(sizes: list[tuple[int, int, int]]) -> None:
    answers = [guessed([0] * (p + a), passes=p, drafted=a + wrong, accepted=a) for p, a, wrong in sizes]
    row = count_drafts([siblings("a", *answers)])
    passes, accepted, wrong = (sum(size[i] for size in sizes) for i in range(3))
    assert row["tokens/drafted"] == accepted + wrong and row["tokens/accepted"] == accepted
    if passes:
        assert row["draft/tokens_per_pass"] == pytest.approx((passes + accepted) / passes)
        assert row["draft/drafted_per_pass"] == pytest.approx((accepted + wrong) / passes)
    else:
        assert np.isnan(row["draft/tokens_per_pass"])
    if accepted + wrong:
        assert row["draft/acceptance"] == pytest.approx(accepted / (accepted + wrong))
