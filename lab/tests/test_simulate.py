"""The simulator of pipelines: equal to its slow twin, to arithmetic by hand, to the laws of the feed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulate import ARMS, DATA, RECORDED, Arm, Simulate, bound_s, work_s, world
from lab.simulator.events import Gate, Mode, Setup, simulate
from lab.simulator.policies import Policy
from lab.simulator.recorded import batched, calibrated, longer
from lab.simulator.sampler import Cost
from lab.simulator.traces import Stream, Trace, log_normal, read_cost, stability
from lab.tests.plain_simulator import PlainGate, simulate_plain
from ostinato.observe.timeline import Kind, Span


def stream(lengths: np.ndarray, prompts: int | np.ndarray = 3) -> Stream:
    groups = len(lengths)
    return Stream(
        lengths=lengths, prompts=np.broadcast_to(prompts, (groups,)), uids=[str(i % 5) for i in range(groups)]
    )


def uneven(seed: int, slots: int) -> Cost:
    """Passes whose times are hardly ever equal by chance."""
    rng = np.random.default_rng(seed)
    return Cost(
        base=(0.0, *np.cumsum(rng.uniform(0.1, 1.0, slots)).tolist()),
        attended_s=float(rng.uniform(0, 0.02)),
        prefill_s=float(rng.uniform(0, 0.05)),
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Setup, Stream]:
    seed = draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    mode = draw(st.sampled_from(Mode))
    staleness = 1 if mode is Mode.ROUNDS else draw(st.integers(0, 3))
    steps = staleness + draw(st.integers(2, 5))
    prompts = draw(st.integers(1, 6))
    setup = Setup(
        workers=draw(st.integers(1, 4)),
        cost=uneven(seed, draw(st.integers(1, 9))),
        prompts=prompts,
        steps=steps,
        staleness=staleness,
        mode=mode,
        policy=draw(st.sampled_from(Policy)),
        oracle=draw(st.booleans()),
        ahead=draw(st.integers(1, 2)),
        train_s=float(rng.uniform(0, 30)),
        train_token_s=float(rng.uniform(0, 0.1)),
        publish_s=float(rng.uniform(0, 2)),
        grade_s=float(rng.uniform(0, 3)),
        graders=draw(st.integers(0, 2)),
        between_s=float(rng.uniform(0, 2)),
        warmup=0,
    )
    lengths = np.ceil(rng.lognormal(2.0, 0.9, (steps * prompts, draw(st.integers(1, 4))))).astype(int)
    return setup, stream(lengths, rng.integers(1, 20, steps * prompts))


@given(worlds())
def test_the_closed_form_is_what_single_passes_add_up_to(world: tuple[Setup, Stream]) -> None:
    fast, slow = simulate(*world), simulate_plain(*world)
    assert fast.trained == slow.trained
    assert fast.steps_s == pytest.approx(slow.steps_s, rel=1e-9)
    assert fast.staleness_mean == pytest.approx(slow.staleness_mean)
    assert fast.staleness_max == slow.staleness_max
    for name in ("bubble_share", "publish_share", "trainer_idle_share", "tokens_per_s", "batch_mean"):
        assert getattr(fast, name) == pytest.approx(getattr(slow, name), rel=1e-6, abs=1e-9)


def test_two_steps_by_hand() -> None:
    """One sampler, passes of 1 s, a prompt of 3 tokens read in 3 s, two groups of one answer of 4 tokens.

    Synchronous: 3 + 4 s to sample, 2 s to train, 1 s to publish, and again. One step ahead, both are sampled
    at once: 6 s to read both prompts, 4 passes, then two steps of training.
    """
    cost = Cost(base=(0.0, 1.0, 1.0, 1.0), prefill_s=1.0)
    setup = Setup(workers=1, cost=cost, prompts=1, steps=2, train_s=2.0, publish_s=1.0, warmup=0)
    two = stream(np.array([[4], [4]]))
    alone = simulate(setup, two)
    assert alone.steps_s == (9.0, 19.0)
    assert alone.bubble_share == pytest.approx(1 - (14 + 1) / 19)
    assert alone.trainer_idle_share == pytest.approx(1 - 4 / 19)
    ahead = simulate(replace(setup, staleness=1), two)
    assert ahead.steps_s == (12.0, 14.0)
    assert ahead.staleness_max == 1


def test_publishing_in_flight_pauses_and_ages_tokens() -> None:
    """Answers of 2 and 12 tokens: the second is sampled by version 0 until the first step has been trained on
    (at 2 + 3 s), pauses 1 s after that pass, and goes on as version 1."""
    cost = Cost(base=(0.0, 1.0, 1.0))
    setup = Setup(workers=1, cost=cost, prompts=1, steps=3, staleness=1, train_s=3.0, publish_s=1.0, warmup=0)
    done = simulate(setup, stream(np.array([[2], [12], [1]])))
    assert done.steps_s[:2] == (5.0, 16.0)
    assert done.staleness_max == 1
    assert done.staleness_mean == pytest.approx(5 / 14)


def test_passes_of_a_cost_table_get_what_a_run_adds_to_them() -> None:
    """A run by hand: both samplers work as long as the true table says, a token is trained in 0.5 s, 2 s
    lie between two steps in which the trainer neither works nor waits, and it waits 20 s for each step, the
    first time 15 s of them for samplers."""
    lengths = stream(np.array([[3, 9], [5, 2], [4, 4], [8, 1]]))
    right = Cost(base=(0.0, 1.0, 1.5, 2.0), attended_s=0.01, prefill_s=0.1)
    setup = Setup(workers=2, cost=longer(right, -0.4), prompts=2, steps=2, mode=Mode.LOCKSTEP, warmup=0)
    busy = simulate(replace(setup, cost=right), lengths).token_s * lengths.lengths.sum()
    spans = [
        Span(worker="sampler-0", kind=Kind.DECODE, start=25.0 - busy, stop=25.0),
        Span(worker="sampler-1", kind=Kind.START, start=0.0, stop=12.0),
    ]
    for step, start in ((1, 30.0), (2, 60.0)):
        spans.append(Span(worker="trainer", kind=Kind.WAIT, start=start - 20, stop=start, step=step))
        spans.append(Span(worker="trainer", kind=Kind.TRAIN, start=start, stop=start + 8, step=step))
    found = calibrated(setup, lengths, spans)
    assert busy > 15 and found.cost.base[1:] == pytest.approx(right.base[1:])
    assert (found.train_token_s, found.between_s) == (16 / lengths.lengths.sum(), 2.0)
    assert found.grade_s == pytest.approx((5 + 20) / 2)


def test_rows_of_drafts_cost_what_so_many_rows_cost() -> None:
    cost = Cost(base=(0.0, 1.0, 2.0, 4.0, 8.0))
    assert batched(cost, 2).base == (0.0, 1.0, 2.0)
    assert batched(cost, 2, 1.5).base == (0.0, 1.5, 4.0)


@given(worlds())
def test_every_group_is_trained_once_and_none_too_late(world: tuple[Setup, Stream]) -> None:
    setup, _ = world
    done = simulate(*world)
    assert sorted(group for step in done.trained for group in step) == list(
        range(setup.steps * setup.prompts)
    )
    assert all(len(step) == setup.prompts for step in done.trained)
    assert done.staleness_max <= setup.staleness
    assert 0 <= done.bubble_share <= 1


@settings(max_examples=20, deadline=None)
@given(worlds())
def test_without_staleness_going_on_is_waiting(world: tuple[Setup, Stream]) -> None:
    setup = replace(world[0], staleness=0, mode=Mode.PIPELINE)
    assert simulate(setup, world[1]) == simulate(replace(setup, mode=Mode.LOCKSTEP), world[1])


@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0, 5000), st.integers(0, 3000))
def test_passes_is_the_inverse_of_span(seed: int, batch: int, attended: float, passes: int) -> None:
    cost = uneven(seed, 9)
    seconds = cost.span(batch, attended, passes)
    assert cost.passes(batch, attended, seconds) == passes
    assert cost.passes(batch, attended, seconds + 1e-4 * cost.base[1]) == passes + 1


def test_drawn_lengths_are_as_long_and_as_steady_as_they_were_asked_to_be() -> None:
    trace = log_normal("drawn", epochs=4, prompts=400, mean=3000.0, limit=16384)
    assert trace.lengths.mean() == pytest.approx(3000, rel=0.01)
    assert 0.005 < (trace.lengths == 16384).mean() < 0.02, "the tail reaches the limit"
    assert 0.96 <= stability(trace.lengths) <= 0.99, "RhymeRL: 2 to 4 % of the ranks change much"
    again = trace.stream(1000)
    assert again.lengths.shape == (1000, 16)
    assert sorted(again.uids[:400]) == sorted({str(n) for n in range(400)})
    first = dict(zip(again.uids[:400], again.lengths[:400], strict=True))
    assert all((first[str(n)] == trace.lengths[1, n]).all() for n in range(400)), "epoch 0 is history"


@given(st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_gate_is_the_rule_of_the_feed(prompts: int, staleness: int, chance: random.Random) -> None:
    """Counts give the answers that ``feed.Rule`` gives on lists, whatever ends when."""
    steps, admitted = staleness + 5, 0
    gates = [kind(prompts=prompts, staleness=staleness, steps=steps) for kind in (Gate, PlainGate)]
    running: dict[int, int] = {}
    while gates[0].finished < steps:
        room = [gate.room() for gate in gates]
        assert room[0] == room[1]
        for gate in gates:
            gate.admit(range(admitted, admitted + room[0]))
        running |= dict.fromkeys(range(admitted, admitted + room[0]), gates[0].finished)
        admitted += room[0]
        batches = [gate.batch() for gate in gates]
        assert batches[0] == batches[1]
        if batches[0]:
            for gate in gates:
                gate.trained(batches[0])
        else:
            group = chance.choice([*running])
            for gate in gates:
                gate.end(running[group], group)
            del running[group]


# ---- ``ostinato bench simulate``: rows, bounds that hold, and recorded traces that can be read


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces_are_whole(name: str) -> None:
    path = DATA / f"simulator-{name}.json"
    trace = Trace.read(path)
    epochs, prompts, samples = trace.lengths.shape
    assert epochs >= 3 and samples == 16 and trace.prompts.shape == (prompts,)
    assert trace.lengths.min() >= 1
    cost = read_cost(path, 64)
    assert cost.slots == 64 and all(a <= b for a, b in zip(cost.base[1:], cost.base[2:], strict=False))
    assert Trace.read(path).to_json() == trace.to_json()


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(ARMS), st.integers(0, 2), st.integers(0, 9))
def test_nothing_is_faster_than_its_bound(arm: Arm, staleness: int, seed: int) -> None:
    """All the work, and for each round its longest answer within staleness + 1 steps."""
    plan = Simulate(counted=2, slots=8, seed=seed)
    setup, stream = world("quickstart", 2, staleness, plan)
    if arm.mode is Mode.ROUNDS and staleness == 0:
        return
    setup = replace(setup, policy=arm.policy, mode=arm.mode, oracle=arm.oracle)
    done = simulate(setup, stream)
    assert done.steps_s[-1] >= work_s(setup.cost, stream) / setup.workers
    if arm.mode is Mode.PIPELINE:
        assert (
            done.steps_s[-1] * (1 + staleness / setup.steps) >= setup.steps * bound_s(setup, stream) * 0.999
        )
