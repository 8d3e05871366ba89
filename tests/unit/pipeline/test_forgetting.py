"""The forgetting watch: quiet runs stay quiet, what is lost is named, and it costs what it may."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_loop import SAMPLING, TEN_A_ROW, Bench, as_saved, deterministic, raises_at

from ostinato.pipeline.forgetting import (
    ALPHA,
    SLICE,
    UNIT,
    Forgetting,
    Question,
    Row,
    State,
    compute_kept_share,
    compute_losses,
    compute_ratios,
    count_questions,
)
from ostinato.pipeline.state import Finish

floats = st.floats(-1e9, 1e9)


def watch(bench: Bench, questions: int = 64, steps: int = 6, **options: float) -> Forgetting:
    """Of a bandit: it gets two tokens, and its answer is right where the first is the next digit."""
    found = [
        Question(tokens=np.array([7, 8, n % 10], np.int32), right=lambda text, n=n: text[0] != str(n % 10))
        for n in range(questions)
    ]
    terms = {"seed": 3, "share": 0.5, "tolerance": 0.05, **options}
    return Forgetting(
        questions=found,
        about="digits",
        sampling=SAMPLING,
        scorer=bench.trainer,
        flops=TEN_A_ROW,
        log=bench.folder.forgetting,
        steps=steps,
        tokens_per_microbatch=64,
        **terms,  # type: ignore[arg-type]
    )


# ---- what is bet


@given(st.lists(floats | st.just(-math.inf), min_size=1, max_size=40), st.floats(0, 0.9))
def test_a_loss_is_a_fair_bet(gains: list[float], tolerance: float) -> None:
    """Within [-1, 1], and never more than the loss beyond the tolerance in its own unit."""
    found = compute_losses(gains, tolerance)
    lost = 1 - compute_ratios(gains)
    assert (found >= -1 - 1e-12).all() and (found <= 1).all()
    assert found.mean() <= (lost.mean() - tolerance) / (UNIT * max(tolerance, 0.01)) + 1e-9
    mean, low, high = compute_kept_share([*gains, 0.0])
    assert 0 <= low <= mean <= high or len(gains) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "coins", "drift"])
def test_false_alarms_are_rare(kind: str) -> None:
    """200 runs of 120 looks each, on the boundary of what is tolerated: rows are drawn once for a run and
    come again in every pass, as in a run, while the policy moves."""
    draw, tolerance, slices = np.random.default_rng(7), 0.05, 6
    alarms = 0
    for _ in range(200):
        rows = draw.uniform(size=(slices, SLICE))  # what a row is like, the same in all passes
        state = State()
        for look in range(120):
            if kind == "none":
                gains = np.zeros(SLICE)
            elif kind == "coins":  # 1 row in 20 is lost altogether, another one at every look
                gains = np.where((rows[look % slices] + 0.003 * look) % 1 < tolerance, -math.inf, 0.0)
            else:  # all rows lose, by what they are like, and 5 % on average
                gains = np.log1p(-2 * tolerance * ((rows[look % slices] + 0.1 * look) % 1))
            state, alarmed = state.advance(compute_losses(gains, tolerance), slices)
            alarms += alarmed
            if alarmed:
                break
    assert alarms <= 200 * ALPHA + 3 * math.sqrt(200 * ALPHA * (1 - ALPHA))


def test_a_pass_bets_on_every_row_once_and_the_passes_share_alpha() -> None:
    state, spent = State(), 0.0
    for _ in range(200):
        assert state.at == 0
        spent += state.bets.alpha
        for _ in range(4):
            state, _ = state.advance(compute_losses(np.zeros(SLICE), 0.05), 4)
    assert spent < ALPHA and state.passed == 200 and state.bets.at == 0


@given(st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), max_size=20))
def test_a_state_survives_json(looks: list[list[float]]) -> None:
    state = again = State()
    for gains in looks:
        state = state.advance(compute_losses(gains, 0.05), 3)[0]
        again = State.of(json.loads(json.dumps(asdict(again))))
        again = again.advance(compute_losses(gains, 0.05), 3)[0]
        assert again == state


def test_a_short_run_asks_nothing() -> None:
    assert count_questions(100) == 0
    assert count_questions(10**9) > count_questions(20_000) >= SLICE


# ---- in a run


def test_a_run_is_watched_within_its_share_and_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, flops=TEN_A_ROW, steps=12, forgetting=lambda one: watch(one, steps=12))
    assert bench.run().why is Finish.DONE
    begin, *looks = bench.folder.forgetting.rows()
    assert begin["step"] == 0 and len(begin["rows"]) >= SLICE and looks
    rows = [*bench.folder.metrics.rows()]
    seen = {row["step"]: row["forgetting/kept"] for row in rows if "forgetting/kept" in row}
    assert seen == {row["step"]: pytest.approx(row["forgetting/kept"]) for row in looks}
    ledger = [*bench.folder.ledger.rows()]
    own = sum(row["flops"] for row in (begin, *looks))
    steps = [row for row in ledger if row["event"] == "step"]
    evaluated = [row for row in ledger if row.get("set") == "forgetting"]
    in_steps = sum(row["forgetting"]["flops"] for row in steps if "forgetting" in row)
    assert own == in_steps + sum(row["flops"]["eval"] for row in evaluated)
    assert sum(row["flops"]["measure"] for row in steps) == in_steps
    assert own <= 0.5 * sum(sum(row["flops"].values()) for row in steps)


def test_kept_is_what_a_slow_twin_computes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, flops=TEN_A_ROW, forgetting=watch)
    bench.run()
    begin, *looks = bench.folder.forgetting.rows()
    before, now = np.log(np.full(10, 0.1)), bench.trainer.logits - np.log(np.exp(bench.trainer.logits).sum())
    last = {place: gain for look in looks for place, gain in zip(look["places"], look["gains"], strict=True)}
    final = [place for look in looks if look["step"] == 6 for place in look["places"]]
    for place in final:
        answer = begin["rows"][place]["tokens"][3:]
        assert last[place] == pytest.approx(sum(now[t] - before[t] for t in answer), abs=1e-4)


def test_a_resumed_run_goes_on_with_rows_and_bets(tmp_path: Path) -> None:
    """Killed after step 4 with a checkpoint of step 3: the looks are those of a run that never stopped."""
    options = {"steps": 8, "forgetting": lambda one: watch(one, steps=8, share=1.0), "flops": TEN_A_ROW}
    whole = Bench(tmp_path / "whole", checkpoint_every=3, **options)
    whole.run()
    begun = Bench(tmp_path / "begun", checkpoint_every=3, **options)
    raises_at(begun, 4, RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        begun.run()
    Bench(tmp_path / "begun", checkpoint_every=3, **options, **as_saved(begun, 0)).run()
    looks = [[deterministic(row) for row in one.folder.forgetting.rows()] for one in (whole, begun)]
    assert looks[0] == looks[1] and len(looks[0]) > 2


def test_what_is_lost_is_named_and_may_end_the_run(tmp_path: Path) -> None:
    """The bandit is trained to say 3 alone; what it could do is to say anything else."""

    def others(one: Bench) -> Forgetting:
        found = watch(one, steps=40, share=1.0)
        right = [Question(tokens=each.tokens, right=lambda text: text[0] != "3") for each in found.questions]
        return replace(found, questions=right)

    bench = Bench(tmp_path, flops=TEN_A_ROW, steps=40, stop_on_forgetting=True, forgetting=others)
    finished = bench.run()
    assert finished.why is Finish.FORGOT and finished.state.step < 40
    (alarm,) = bench.folder.watch.rows()
    assert (alarm["rule"], alarm["step"]) == ("forgetting", finished.state.step)
    assert "digits" in alarm["sentence"]


def test_what_is_not_finite_is_lost() -> None:
    row = Row(tokens=np.arange(5, dtype=np.int32), logprobs=np.zeros(2, np.float32), right=True)
    assert (
        row.compute_gain(np.array([0.0, np.nan])) == row.compute_gain(np.array([0.0, -np.inf])) == -math.inf
    )
    assert compute_losses([-math.inf], 0.05)[0] == 1.0


def test_rows_that_nobody_judges_count_by_the_token() -> None:
    row = Row(tokens=np.arange(5, dtype=np.int32), logprobs=np.zeros(4, np.float32), right=None)
    assert row.compute_gain(np.full(4, -0.1)) == pytest.approx(-0.1)
    assert replace(row, right=True).compute_gain(np.full(4, -0.1)) == pytest.approx(-0.4)
