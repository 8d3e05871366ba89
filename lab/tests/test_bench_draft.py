"""What the draft benches make of their clocks: ratios, medians, the shape of the JSON. No engine runs."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lab import draft, epochs, history, never_slower
from lab.arms import Holder, Nothing, Oracle, best_depth
from lab.draft import Arm, Measured
from lab.never_slower import Pairs, past
from lab.settings import machine
from ostinato.config import Recipe
from ostinato.history.lengths import Lengths
from ostinato.types import (
    Completion,
    DraftQuery,
    Drafts,
    HistoryEntry,
    Request,
    SampledTokens,
    Sampling,
    Stop,
)

few = settings(max_examples=25, deadline=None)


def row(arm: Arm = Arm.OURS, seconds: float = 1.0, **changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "batch": 8,
        "round": 0,
        "epoch": 1,
        "step": 1,
        "drafting_s": 0.0,
        "index_s": 0.0,
    }
    fields |= {"tokens": 100, "passes": 50, "drafted": 80, "accepted": 60, "mismatches": 0}
    return Measured(arm=arm, seconds=seconds, **(fields | changes))


def request(seed: int = 0, length: int = 3) -> Request:
    return Request(tokens=np.arange(length, dtype=np.int32), sampling=Sampling(), seed=(seed,), uid="a")


def completion(tokens: list[int]) -> Completion:
    n = len(tokens)
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.log(np.full(n, 0.5, np.float32)),
        edges=np.full(n, 0.25, np.float32),
        versions=np.zeros(n, np.int32),
        stop=Stop.EOS,
    )


def running(room: list[int], seconds: np.ndarray) -> DraftQuery:
    n = len(room)
    return DraftQuery(
        handles=np.arange(n), room=np.array(room, np.int32), weights=np.ones(n, np.float32), seconds=seconds
    )


def shown(table: Any) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# ---- bench draft


def test_a_speedup_is_plain_seconds_over_the_arms_own() -> None:
    plain, ours = [row(Arm.OFF, 3.0, drafted=0, accepted=0)], [row(Arm.OURS, 2.0, drafting_s=0.1)]
    found = draft.figures(ours, plain)
    assert found["speedup"] == 1.5 and found["tokens_per_pass"] == 2.0 and found["acceptance"] == 0.75
    assert found["drafting_share"] == 0.05
    assert draft.figures(plain, plain)["acceptance"] is None  # nothing was drafted: no share of nothing


def test_a_steps_seconds_are_the_median_of_its_rounds() -> None:
    """Summed per round first, one disturbed step would spoil its whole round."""
    seconds = {(1, 0): 1.0, (1, 1): 9.0, (1, 2): 1.2, (2, 0): 9.0, (2, 1): 2.0, (2, 2): 2.2}
    rows = [row(seconds=value, step=step, round=round_) for (step, round_), value in seconds.items()]
    assert draft.rollout_s(rows) == pytest.approx(1.2 + 2.2)


def test_every_arm_is_compared_at_its_best_batch() -> None:
    def entry(batch: int, off: float, ours: float) -> dict[str, Any]:
        arms = [{"name": "off", "total": {"rollout_s": off}}, {"name": "ours", "total": {"rollout_s": ours}}]
        return {"batch": batch, "arms": arms}

    best = draft.best([entry(64, 4.0, 3.0), entry(16, 6.0, 2.5)])
    assert best["off"] == {"batch": 64, "rollout_s": 4.0, "speedup": 1.0}
    assert best["ours"] == {"batch": 16, "rollout_s": 2.5, "speedup": 1.6}


def test_the_json_has_the_shape_that_is_asked_for() -> None:
    plan = draft.Draft(overrides=("model.dtype=float32",), batches=(8, 4), epochs=2)
    rows = [
        row(arm, 2.0 if arm is Arm.OFF else 1.0, batch=batch, epoch=epoch, step=epoch, mismatches=epoch - 1)
        for batch in (8, 4)
        for arm in Arm
        for epoch in (1, 2)
    ]
    result = json.loads(json.dumps(draft.summary(plan, rows)))
    assert [entry["epoch"] for entry in result["epochs"]] == [1, 2]
    asked = {"epoch", "tokens_per_pass", "acceptance", "rollout_s", "speedup"}
    assert asked <= result["epochs"][0].keys() and result["total"]["speedup"] == 2.0
    assert [entry["name"] for entry in result["baselines"]] == [
        str(arm) for arm in Arm if arm is not Arm.OURS
    ]
    assert all(asked <= epoch.keys() for entry in result["baselines"] for epoch in entry["epochs"])
    assert result["settings"]["headline_batch"] == 8 and [b["batch"] for b in result["batches"]] == [8, 4]
    assert result["mismatches"] == 2 * len(Arm) and result["compared"] == 256 * len(rows)
    text = shown(draft.Draft.table(result))
    assert "ours" in text and "2.00x" in text and "answers differ" in text


@pytest.mark.parametrize(
    ("field", "value"), [("batches", (0,)), ("batches", ()), ("epochs", 0), ("rounds", 0)]
)
def test_a_plan_of_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^--\w+ is .*; (use|give) [^.]*$"):
        draft.Draft(**{field: value})


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("task.n_train=30", "task.n_train is 30"),
        ("adapter.kind=full", "adapter.kind is"),
        ('rollout.stop=["."]', "rollout.stop is"),
    ],
)
def test_a_recipe_that_cannot_be_replayed_is_named(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        epochs.check(Recipe.load("quickstart", override))


def test_the_lengths_of_a_step_are_by_prompt() -> None:
    lengths = Lengths()
    assert draft.expected_length(lengths, request()) == 0.0  # nothing known is no forecast of infinity
    lengths.observe("a", [3, 5], [False, True])
    assert 3 <= draft.expected_length(lengths, request()) <= 5


def test_one_other_token_is_a_mismatch() -> None:
    said = [completion([1, 2, 3]), completion([4])]
    assert draft.mismatches(said, said) == 0
    assert draft.mismatches(said, [completion([1, 2, 4]), completion([4])]) == 1
    assert draft.mismatches(said, [completion([1, 2]), completion([4])]) == 1


# ---- the oracle, and who holds the place


@few
@given(
    left=st.lists(st.integers(-1, 9), min_size=1, max_size=5),
    costs=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30),
)
def test_the_oracle_drafts_as_deep_as_pays(left: list[int], costs: list[float]) -> None:
    seconds = 1.0 + np.cumsum(costs)

    def speed(counts: np.ndarray) -> float:
        return (len(left) + counts.sum()) / seconds[counts.sum()]

    counts = best_depth(np.array(left), seconds)
    allowed = [np.clip(left, 0, depth) for depth in range(33)]
    fits = [speed(other) for other in allowed if other.sum() < len(seconds)]
    assert counts.sum() < len(seconds) and speed(counts) == pytest.approx(max(fits))


def test_the_oracle_follows_what_is_said() -> None:
    truth = {(0,): np.array([5, 6, 7, 8]), (1,): np.array([9])}
    oracle = Oracle(truth)
    handles = np.array([oracle.open(request(0)), oracle.open(request(1))])
    cheap = np.ones(20)
    first = oracle.propose(running([4, 4], cheap))
    assert first.counts.tolist() == [3, 0]  # the pass itself gives the last token
    assert first.tokens.tolist() == [5, 6, 7] and first.parents.tolist() == [-1, 0, 1]
    said = np.array([5, 6, 9], np.int32)
    oracle.observe(
        SampledTokens(
            handles=handles,
            counts=np.array([2, 1]),
            tokens=said,
            probs=np.ones(3),
            edges=np.zeros(3),
            ended=np.array([False, True]),
        )
    )
    then = oracle.propose(running([2], cheap))
    assert then.counts.tolist() == [1] and then.tokens.tolist() == [7]


def test_a_holder_passes_on_and_counts_the_time() -> None:
    ticks = iter(range(100))
    holder = Holder(Nothing(), clock=lambda: float(next(ticks)))
    assert holder.open(request()) == 0
    assert holder.propose(running([3, 3], np.ones(4))).counts.tolist() == [0, 0]
    assert holder.seconds == 2.0


# ---- never slower


def test_the_ratio_is_a_median_of_turns_and_its_error_shrinks() -> None:
    wild = Pairs(plain=(1.0, 1.1, 50.0, 0.9, 1.0), drafts=(1.0, 1.0, 1.0, 1.0, 1.0))
    assert wild.ratio == 1.0 and 0 < wild.error < 0.1
    longer = Pairs(plain=wild.plain * 16, drafts=wild.drafts * 16)
    assert longer.error == pytest.approx(wild.error / 4)
    assert Pairs(plain=(1.0,), drafts=(1.0,)).error == float("inf")


def test_the_worst_cell_is_told() -> None:
    def cell(ratio: float, batch: int) -> dict[str, Any]:
        named = {"model": "m", "temperature": 0.6, "batch": batch, "history": "useless", "mismatches": 0}
        return named | {"ratio": ratio, "error": 0.001}

    plan = never_slower.NeverSlower(batches=(1, 4), temperatures=(0.6,))
    result = never_slower.summary(plan, [cell(1.2, 1), cell(0.96, 4)], ["other was skipped: it is not here"])
    assert result["worst"]["ratio"] == 0.96 and result["below"] == 1
    text = shown(never_slower.NeverSlower.table(json.loads(json.dumps(result))))
    assert "the worst is 0.960" in text and "other was skipped" in text
    assert "no cell was measured" in shown(never_slower.NeverSlower.table(never_slower.summary(plan, [], [])))


def test_misleading_history_is_anothers_and_its_intervals_lie() -> None:
    answers = {uid: (past(np.arange(20), completion([n] * 30)),) for n, uid in enumerate("ab")}
    moved = never_slower.misleading(answers)
    assert moved["a"][0].tokens.tolist() == [1] * 30 and moved["b"][0].tokens.tolist() == [0] * 30
    edges = moved["a"][0].edges
    assert len(set(edges.tolist())) > 20 and (edges >= 0).all() and (edges + moved["a"][0].probs <= 1).all()
    assert len(answers["a"][0].context) == 8  # only the end of the prompt is kept


# ---- bench history


def follower(tokens: list[int]) -> history.Follower:
    n = len(tokens)
    said = HistoryEntry(
        context=np.zeros(0, np.int32),
        tokens=np.array(tokens, np.int32),
        probs=np.ones(n, np.float32),
        edges=np.zeros(n, np.float32),
    )
    return history.Follower(handle=0, will_say=said)


@pytest.mark.parametrize(
    ("drafted", "emitted"),
    [
        ([], [1]),
        ([1], [1, 2]),
        ([1, 2, 3], [1, 2, 3]),
        ([2], [1]),
        ([1, 3, 3], [1, 2]),
        ([1, 2, 3, 4], [1, 2, 3]),
    ],
)
def test_verification_gives_one_token_more_than_it_accepts(drafted: list[int], emitted: list[int]) -> None:
    one = follower([1, 2, 3])
    n = len(drafted)
    drafts = Drafts(
        counts=np.array([n], np.int32), tokens=np.array(drafted, np.int32), parents=np.arange(n) - 1
    )
    given_ = history.verified([one], drafts)
    assert given_.tokens.tolist() == emitted and one.said == len(emitted)
    assert given_.ended.tolist() == [len(emitted) == 3]


def test_the_synthetic_answers_hold_the_uniforms_that_drew_them() -> None:
    plan = history.HistoryCost(prompts=1, group=2, length=400, vocab=1000)
    world, u = history.World.of(plan, 0), np.random.default_rng(7).random(400)
    said = world.answer(u, np.random.default_rng(8))
    again = world.answer(u, np.random.default_rng(8))
    assert said.tokens.tolist() == again.tokens.tolist()
    follows = said.tokens == world.tokens
    inside = (said.edges <= u) & (u < said.edges + said.probs)
    assert 0.4 < follows.mean() < 1.0 and inside[~follows].all() and inside.mean() > 0.95


def test_the_history_table_sets_figures_beside_limits() -> None:
    store = {"tokens": 10**7, "build_tokens_per_s": 2_500_000, "bytes_per_token": 9.25}
    store |= {"resident_bytes_per_token": 9.5, "find_us": 0.4}
    drafting = {
        "batch": 16,
        "us_per_sequence_pass": 0.5,
        "passes": {"m": {"pass_ms": 1.0, "drafting_share": 0.008}},
    }
    result = {"store": store, "drafting": [drafting], "skipped": [], "settings": {"allowed": history.ALLOWED}}
    text = shown(history.HistoryCost.table(result))
    assert "2.50 M tokens/s" in text and "9.25 B per token" in text and "0.80%" in text


def test_the_machine_is_named() -> None:
    found = machine()
    assert found["cores"] >= 1 and {"processor", "threads", "load_average", "torch"} <= found.keys()
    json.dumps(found)
