"""The stability watch: says nothing of healthy runs, and names a collapse when it comes."""

from __future__ import annotations

import math
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ostinato.observe.stability import Alarm, Limits, Rule, Watch, watch_after

NAMES = {
    "reward": "reward",
    "k3": "sampling/kl_k3",
    "tail": "sampling/tail_2",
    "norm": "grad_norm",
    "entropy": "entropy",
    "spread": "reward_std",
    "cut": "completions/clipped_ratio",
}

# sixty steps of quickstart (seed 0, two digits of each value): a run that learns its task
QUICKSTART = {
    "reward": """
        0.24 0.27 0.24 0.3 0.44 0.39 0.68 0.66 0.59 0.8 0.61 0.76 0.76 0.69 0.84 0.82 0.84 0.77 0.68
        0.85 0.72 0.82 0.77 0.86 0.8 0.81 0.94 0.88 0.88 0.94 0.88 0.86 0.82 0.75 0.73 0.89 0.8 0.92
        0.95 0.91 0.86 0.73 0.77 0.97 0.86 0.93 0.97 0.88 0.82 0.81 0.84 0.91 0.89 0.95 0.93 0.93 0.89
        0.88 0.85 0.91
    """,
    "sampling/kl_k3": """
        2e-05 1.8e-05 2.8e-05 2.3e-05 1.7e-05 1.5e-05 6.7e-06 1.5e-05 9.8e-06 5.8e-06 9.8e-06 4.8e-06
        3e-06 6.6e-06 5.3e-06 9.4e-06 6.3e-06 1.1e-05 1.4e-05 1.6e-06 1.1e-05 6e-06 1.1e-05 4.5e-06
        1.9e-06 4.4e-06 3.9e-06 4e-06 4.5e-06 6.4e-06 2.4e-06 6.9e-06 7.4e-06 4.4e-06 8.7e-06 3.1e-06
        8.2e-06 8.7e-06 1.7e-05 2.9e-06 7.8e-06 1.1e-05 2.5e-06 6.4e-07 8.6e-06 9.6e-06 9.6e-07 1.9e-05
        8.1e-06 5e-06 1.2e-05 2.5e-05 1.4e-05 8e-06 6.2e-06 2.4e-06 7.1e-06 3.3e-06 7.3e-06 4.4e-06
    """,
    "grad_norm": """
        0.014 0.015 0.015 0.013 0.018 0.016 0.013 0.016 0.015 0.013 0.018 0.015 0.014 0.012 0.016 0.012
        0.013 0.021 0.032 0.0069 0.014 0.021 0.017 0.014 0.019 0.014 0.0099 0.01 0.011 0.013 0.015 0.023
        0.017 0.016 0.014 0.011 0.012 0.015 0.031 0.0076 0.014 0.029 0.01 0.0064 0.019 0.014 0.0058
        0.024 0.017 0.013 0.021 0.011 0.011 0.012 0.018 0.011 0.02 0.011 0.015 0.0095
    """,
    "entropy": """
        0.38 0.32 0.29 0.25 0.19 0.16 0.099 0.084 0.1 0.06 0.095 0.07 0.042 0.055 0.044 0.054 0.054
        0.052 0.07 0.07 0.057 0.063 0.047 0.027 0.033 0.04 0.026 0.044 0.059 0.023 0.027 0.025 0.044
        0.046 0.036 0.038 0.046 0.03 0.041 0.042 0.042 0.053 0.048 0.11 0.039 0.034 0.03 0.06 0.042
        0.037 0.042 0.038 0.036 0.018 0.054 0.038 0.041 0.029 0.034 0.073
    """,
}


def quickstart() -> list[dict[str, Any]]:
    columns = {name: [float(value) for value in text.split()] for name, text in QUICKSTART.items()}
    return [
        {"step": step, "sampling/tail_2": 0.0, **dict(zip(columns, values, strict=True))}
        for step, values in enumerate(zip(*columns.values(), strict=True), start=1)
    ]


def run(steps: int = 60, **columns: Any) -> list[dict[str, Any]]:
    """Rows of a level healthy run; a column given as a function of the step replaces its own."""
    level = {"reward": 0.5, "k3": 1e-5, "tail": 0.0, "norm": 0.02, "entropy": 1.0, "spread": 0.5, "cut": 0.0}
    return [
        {"step": step}
        | {
            NAMES[name]: columns[name](step) * (1 + 0.1 * math.sin(step)) if name in columns else value
            for name, value in level.items()
        }
        for step in range(1, steps + 1)
    ]


def alarms(rows: list[dict[str, Any]], limits: Limits | None = None) -> list[Alarm]:
    watch = Watch(limits)
    return [alarm for row in rows for alarm in watch.see(row)]


def reported(rows: list[dict[str, Any]]) -> list[tuple[Rule, int, int]]:
    return [(alarm.rule, alarm.since, alarm.step) for alarm in alarms(rows)]


def test_a_run_that_learns_sets_off_nothing() -> None:
    """Entropy falls to 6 % of where it began, k3 wanders by a factor of 40, the gradient by 8."""
    rows = quickstart()
    assert len(rows) == 60 and alarms(rows) == []


def test_the_two_definitions_of_the_studies() -> None:
    """F(2) above 0.1 for 5 steps; half of what the reward had lost for 20 (means of 5 steps)."""
    tail = run(tail=lambda step: 0.15 if step >= 31 else 0.02)
    assert reported(tail) == [(Rule.TAIL, 31, 35)]
    assert reported([row for row in tail if row["step"] < 35]) == []
    reward = run(reward=lambda step: 0.8 if step < 21 else 0.1)
    ((rule, since, step),) = reported(reward)
    assert rule is Rule.REWARD and step == since + 19 and 22 <= since <= 25


def test_a_small_gain_that_is_lost_again_is_no_collapse() -> None:
    """From 0.7 to 0.95 and back: half of the gain is lost, but the policy still solves seven of ten."""
    rewards = [0.7] * 10 + [0.95] * 20 + [0.72] * 40
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)]
    assert alarms(rows) == []
    below_zero = [{**row, "reward": row["reward"] - 1} for row in rows]  # there 0 is no zero
    assert [alarm.rule for alarm in alarms(below_zero)] == [Rule.REWARD]


def test_k3_is_measured_on_the_scale_of_the_run() -> None:
    jump = run(k3=lambda step: 1e-5 if step < 30 else 0.2)
    assert reported(jump) == [(Rule.KL, 30, 34)]
    (alarm,) = alarms(jump)
    assert alarm.collapse and "its first steps had a median of 1e-05" in alarm.sentence
    assert reported(run(k3=lambda step: 1e-5 if step < 30 else 0.04)) == []  # 4000 times next to nothing
    assert reported(run(k3=lambda step: 0.01 if step < 30 else 0.2)) == []  # 20 times of a loose engine
    assert reported(run(k3=lambda step: 0.0 if step < 30 else 0.2)) == [(Rule.KL, 30, 34)]  # after exact fp32


def test_a_gradient_beyond_fifty_times_its_median_is_a_sign_and_no_collapse() -> None:
    burst = run(norm=lambda step: 2.0 if 40 <= step < 43 else 0.02)
    assert reported(burst) == [(Rule.GRADIENT, 40, 42)]
    assert not alarms(burst)[0].collapse
    assert reported(run(norm=lambda step: 2.0 if 40 <= step < 42 else 0.02)) == []  # two steps are a spike
    assert reported(run(norm=lambda step: 0.02 * 1.06**step)) == []  # it may grow, 30-fold here
    assert reported(run(norm=lambda step: 0.0 if step % 2 else 0.02)) == []  # steps without gradients


def test_entropy() -> None:
    def narrowed(step: int) -> float:
        return 1.0 if step < 30 else 0.01

    assert reported(run(entropy=narrowed)) == []  # the reward is at its best: the task is solved
    (found,) = reported(run(entropy=narrowed, reward=lambda step: 0.6 if step < 30 else 0.4))
    assert found[0] is Rule.ENTROPY_LOW
    dissolving = run(entropy=lambda step: 0.5 + 0.1 * max(0, step - 20))
    assert [rule for rule, _, _ in reported(dissolving)] == [Rule.ENTROPY_HIGH]
    assert reported(run(entropy=lambda step: 0.02 if step < 20 else 0.1)) == []  # 5 times next to nothing


def cut_short(*shares: float) -> list[tuple[Rule, int]]:
    """What is reported of a run whose share of truncated answers goes through these, ten steps each."""
    column = [share for share in shares for _ in range(10)]
    rows = [{"step": n, "completions/clipped_ratio": share} for n, share in enumerate(column, start=1)]
    found = alarms(rows)
    assert not any(alarm.collapse for alarm in found)
    return [(alarm.rule, alarm.step) for alarm in found]


def test_truncation_warns_above_ten_percent_and_alarms_above_fifteen() -> None:
    """Means of ten steps, each reported once; 10 % and 15 % themselves are not above."""
    assert cut_short(0.02, 0.07, 0.10) == []
    assert cut_short(0.02, 0.12, 0.14) == [(Rule.TRUNCATED, 19)]  # 1 x 0.02 + 9 x 0.12 = 1.1 of 10
    assert cut_short(0.02, 0.20, 0.02, 0.20) == [(Rule.TRUNCATED, 15), (Rule.TRUNCATED_MUCH, 18)]


def test_a_policy_that_begins_truncated_is_told_so_and_may_unlearn_it() -> None:
    """It has not risen: the sentence about runs that do not recover is not for it, until it rises again."""
    assert cut_short(0.4, 0.5, 0.3) == [(Rule.TRUNCATED_EARLY, 10)]
    assert cut_short(0.4, 0.02, 0.02) == [(Rule.TRUNCATED_EARLY, 10)]
    risen = [(Rule.TRUNCATED, 35), (Rule.TRUNCATED_MUCH, 38)]
    assert cut_short(0.4, 0.02, 0.02, 0.2) == [(Rule.TRUNCATED_EARLY, 10), *risen]
    assert cut_short(0.12, 0.2) == [(Rule.TRUNCATED_EARLY, 10), (Rule.TRUNCATED_MUCH, 14)]


def test_a_policy_that_begins_truncated_may_still_come_apart() -> None:
    """Of a run that rose from 18 % to 95 % it was reported that it begins so, and nothing more."""
    early = (Rule.TRUNCATED_EARLY, 10)
    assert cut_short(0.18, 0.3, 0.95) == [early, (Rule.TRUNCATED_MUCH, 21)]
    assert cut_short(0.18, 0.3, 0.32) == [early], "not 15 points more"


def test_noise_of_a_rare_reward_is_no_fall() -> None:
    """Answers are right by luck, 32 in a step. Without the demand that a fall exceed its noise, 58 of 60 such
    runs of 200 steps at a rate of 0.005 were reported to have collapsed."""
    for seed in range(20):
        dice = random.Random(seed)
        rate = (0.005, 0.02)[seed % 2]
        rewards = [sum(dice.random() < rate for _ in range(32)) / 32 for _ in range(200)]
        rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)]
        assert alarms(rows) == []


values = st.one_of(
    st.none(),
    st.just(math.nan),
    st.just(math.inf),
    st.floats(-2, 2),
    st.floats(0, 1e-6),
    st.sampled_from([0.0, 0.01, 0.5, 1.0, 100.0, 1e30, -1e30]),
)
tables = st.lists(
    st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES.values(), values)), min_size=0, max_size=60
).map(lambda rows: [{"step": step, **row} for step, row in enumerate(rows, start=1)])
QUICK = Limits(
    kl_steps=2,
    tail_steps=2,
    reward_steps=3,
    gradient_before=3,
    gradient_steps=2,
    window=2,
    least=2,
    truncated_window=2,
    truncated_alarm=0.3,
    truncated_steps=2,
)


@given(tables, st.integers(-8, 8))
def test_nothing_raises_and_the_unit_of_the_reward_is_nothing(rows: list[dict[str, Any]], power: int) -> None:
    """Powers of two, so that scaling itself rounds nothing."""
    scaled = [
        row | {name: row[name] * 2.0**power for name in ("reward", "reward_std") if row.get(name) is not None}
        for row in rows
    ]
    for limits in (None, QUICK):
        before, after = alarms(rows, limits), alarms(scaled, limits)
        assert [(a.rule, a.since, a.step) for a in before] == [(a.rule, a.since, a.step) for a in after]


@given(st.lists(st.integers(0, 16), min_size=10, max_size=60), st.integers(-32, 32))
def test_what_a_reward_of_zero_means_is_nothing(sixteenths: list[int], shift: int) -> None:
    """Sixteenths, so that sums round nothing."""

    def alarmed(offset: int) -> list[tuple[Rule, int, int]]:
        rows = [
            {"step": step, "reward": (value + offset) / 16, "entropy": 1.0 if step < 5 else 0.01}
            for step, value in enumerate(sixteenths, start=1)
        ]
        return [(alarm.rule, alarm.since, alarm.step) for alarm in alarms(rows, QUICK)]

    assert alarmed(shift) == alarmed(0)


def test_a_reward_that_is_a_penalty_can_fall() -> None:
    """From -1 to -0.1 and back: the rule looked only at rewards above 0, and was silent."""

    def course(zero: float) -> list[dict[str, Any]]:
        rise = [min(1.0, step / 30) if step < 60 else 0.0 for step in range(1, 120)]
        return [{"step": step, "reward": zero + 0.9 * share} for step, share in enumerate(rise, start=1)]

    assert [rule for rule, _, _ in reported(course(-1.0))] == [Rule.REWARD]
    assert reported(course(-1.0)) == reported(course(0.0))


def test_a_run_that_began_high_and_gained_little_may_lose_it_again() -> None:
    """The scale of a fall is then how far answers differ, 0.5 here: 0.1 is no collapse, 0.4 is one."""

    def after(level: float) -> list[Rule]:
        rows = run(90, reward=lambda step: 0.5 if step < 20 else 0.55 if step < 40 else level)
        return [rule for rule, _, _ in reported(rows)]

    assert after(0.45) == [] and after(0.15) == [Rule.REWARD]


@given(tables, st.integers(0, 60))
def test_only_the_past_counts(rows: list[dict[str, Any]], cut: int) -> None:
    """What is reported of a run after n steps is what is reported of the first n steps of the whole; a watch
    that was rebuilt from them goes on as if it had never stopped."""
    whole = alarms(rows, QUICK)
    assert alarms(rows[:cut], QUICK) == [alarm for alarm in whole if alarm.step <= cut]
    rebuilt = watch_after(rows[:cut], QUICK)
    later = [alarm for row in rows[cut:] for alarm in rebuilt.see(row)]
    assert later == [alarm for alarm in whole if alarm.step > cut]
    assert rebuilt.collapsed == any(alarm.collapse for alarm in whole)
