"""The books of a step: what it computed, what of it was in vain and why, all of it to the last FLOP."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode
from nouns import group_of as group
from small_loop import TEN_A_ROW, Bench, Dies, Killed, as_saved, send

from ostinato.model.flops import FlopModel, Part, Rates
from ostinato.observe.ledger import Ledger, SteadyClock, Summary, Terms, read, summary
from ostinato.observe.timeline import Kind, Span, pool_of
from ostinato.pipeline.credit import Credit
from ostinato.pipeline.loop import LoopState
from ostinato.pipeline.step_metrics import (
    MONEY,
    Clock,
    Costs,
    add_totals,
    busy_by_pool,
    pipeline_row,
    sampling_flops,
    step_costs,
    token_counts,
    trained_tokens,
)
from ostinato.run import RunFolder
from ostinato.types import (
    Batch,
    Group,
    Microbatch,
    Segment,
    StepReport,
    Trajectory,
)

TEN = FlopModel(parts={Part.MLP: Rates(tokens=10.0)}, backward_rates=Rates(tokens=20.0))
CONTEXT = 5


def answer(length: int, drafted: int = 0, accepted: int = 0) -> Trajectory:
    """``length`` sampled tokens behind a prompt of 5, of which nothing was cached."""
    return episode(completion(length, drafted=drafted, accepted=accepted), CONTEXT)


def batch(rows: int, trained: int) -> Batch:
    floats = np.zeros(trained, np.float32)
    microbatch = Microbatch(
        tokens=np.zeros(rows, np.int32),
        positions=np.arange(rows, dtype=np.int32),
        segments=(Segment(start=0, stop=rows),),
        rows=np.zeros(trained, np.int32),
        targets=np.zeros(trained, np.int32),
        logprobs=floats,
        advantages=floats,
        weights=floats,
        sample_idx=np.zeros(trained, np.int32),
        staleness=np.zeros(trained, np.int32),
        uids=("p#0",),
    )
    return Batch(
        microbatches=(microbatch,), num_samples=1, num_tokens=trained, num_context_tokens=rows - trained
    )


def credit(**wasted: int) -> Credit:
    return Credit(samples=[], weights=[], dropped_groups=Counter(), wasted_tokens=Counter(wasted))


def report(**metrics: float) -> StepReport:
    usual = {"optimizer_steps": 1.0, "refused_steps": 0.0}
    return StepReport(metrics={**usual, **{name.replace("__", "/"): n for name, n in metrics.items()}})


def everything(costs: Costs) -> int:
    assert costs.useful + sum(costs.wasted.values()) == sum(costs.flops.values())
    assert all(isinstance(n, int) and n >= 0 for n in (costs.useful, *costs.wasted.values()))
    return sum(costs.flops.values())


def test_a_step_by_hand() -> None:
    """Two answers of 8: 13 rows less the last token each, so 24; one is dropped. Two drafts failed."""
    groups = [group(answer(8, drafted=3, accepted=1), answer(8))]
    costs = step_costs(TEN, groups, credit(zero_variance=8), batch(12, 8), report(passes__measure=2.0))
    assert costs.flops == {"sample": 240 + 20, "train": 360, "measure": 240}
    assert costs.wasted == {"zero_variance": 120, "refused_drafts": 20, "measurement": 240}
    assert costs.useful == 120 + 360 and everything(costs) == 860
    figures = costs.figures()
    assert figures["flops/rollout"] == 260 and figures["flops/wasted"] == 380


def test_what_the_engine_ran_again_is_wasted() -> None:
    """Preempted after 9 of its rows, of which 5 were still cached."""
    one = answer(8)
    said = replace(one.turns[0].completion, recomputed=np.array([[5, 9]], np.int32))
    groups = [group(replace(one, turns=(replace(one.turns[0], completion=said),)))]
    costs = step_costs(TEN, groups, credit(), batch(12, 8), report())
    assert costs.flops["sample"] == 120 + 40 and everything(costs) == 520
    assert costs.wasted == {"recomputed": 40} and costs.useful == 120 + 360
    assert token_counts(groups)["recomputed"] == 4


def test_further_passes_are_training_and_what_a_refused_step_cost_is_wasted() -> None:
    """Two optimizer steps, one of them refused: half of what was sampled and trained, and all of looking for
    the samples at fault, which ran half of the batch once more."""
    groups, made = [group(answer(8))], batch(12, 8)
    assert step_costs(TEN, groups, credit(), made, report(passes__extra=1.0)).flops["train"] == 360 + 120
    refused = report(refused_steps=1.0, optimizer_steps=1.0, passes__repeated=0.5)
    costs = step_costs(TEN, groups, credit(), made, refused)
    assert costs.flops == {"sample": 120, "train": 360 + 180, "measure": 0}
    assert costs.wasted == {"refused_step": (120 + 360) // 2 + 180}
    all_of_it = step_costs(TEN, groups, credit(), made, StepReport(metrics={}, skipped="the loss is nan"))
    assert all_of_it.useful == 0 and everything(all_of_it) == 480


@st.composite
def steps(draw: st.DrawFn) -> tuple[Sequence[Group], Credit, Batch | None, StepReport | None]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    answers = []
    for length in lengths:
        accepted = draw(st.integers(0, length - 1))
        answers.append(answer(length, drafted=accepted + draw(st.integers(0, 9)), accepted=accepted))
    names = ("zero_variance", "zero_advantage", "truncated", "no_verdict", "failed")
    wasted, left = Counter[str](), sum(lengths)
    for name in names:
        wasted[name] = draw(st.integers(0, left))
        left -= wasted[name]
    if not left:
        return [group(*answers)], credit(**wasted), None, None
    refused, taken = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    passes = {f"passes__{name}": draw(st.floats(0, 3)) for name in ("extra", "measure", "repeated")}
    told = report(refused_steps=float(refused), optimizer_steps=float(taken), **passes)
    return [group(*answers)], credit(**wasted), batch(left + draw(st.integers(0, 30)), left), told


@settings(max_examples=50, deadline=None)
@given(steps(), st.floats(1e-3, 1e15), st.floats(0, 1e15), st.floats(0, 1e15))
def test_useful_and_wasted_are_all(
    step: tuple[Sequence[Group], Credit, Batch | None, StepReport | None],
    row: float,
    pair: float,
    logit: float,
) -> None:
    """To the last FLOP, whatever the shapes: they are whole numbers."""
    rates = Rates(row, pair, logit)
    model = FlopModel(parts={Part.MLP: rates}, backward_rates=rates + rates)
    costs = step_costs(model, *step)
    everything(costs)
    groups, told, made, _ = step
    shares = sum(n for name, n in costs.wasted.items() if name in told.wasted_tokens)
    sampling, vain = sampling_flops(model, groups)
    assert costs.wasted.get("refused_drafts", 0) == vain.total()
    if made is None:
        assert costs.useful == 0
    else:  # in proportion to tokens, but for rounding
        part = told.wasted_tokens.total() / token_counts(groups)["sampled"]
        assert abs(shares - part * sampling) <= len(told.wasted_tokens) + 1e-9 * sampling


def test_tokens_of_a_refused_step_have_trained_nothing(tmp_path: Path) -> None:
    """The ledger had all of them as trained, while none of their FLOPs was useful."""
    bench = Bench(tmp_path, steps=3, flops=TEN_A_ROW)
    bench.trainer.refuse = True
    bench.run()
    found = summary(read(bench.folder))
    assert found.tokens["trained"] == found.useful == 0
    assert found.tokens["sampled"] == sum(found.dropped.values()) and found.dropped["refused_step"] > 0
    assert [row["tokens/trained"] for row in bench.rows] == [0, 0, 0]
    assert bench.rows[-1]["total/trained_tokens"] == 0
    assert all(row["tokens/wasted"] == row["tokens/sampled"] for row in bench.rows)
    half = report(refused_steps=1.0, optimizer_steps=1.0)
    assert trained_tokens(credit(truncated=3), batch(12, 9), half) == (5, {"truncated": 3, "refused_step": 4})


def test_device_seconds_and_money_are_those_of_the_devices_and_prices_of_each_step(tmp_path: Path) -> None:
    """They were all seconds so far, times the devices of now."""
    books = Ledger(folder=RunFolder(tmp_path), terms=Terms(price_per_device_hour=2.0))
    first = Bench(tmp_path, steps=6)
    first.loop.ledger = books
    send(first, signal.SIGINT, after_steps=2)
    first.run()
    saved, logits = first.saved[-1]
    for devices, price, known in ((8, 3.0, True), (1, 0.0, False)):
        again = Bench(tmp_path, steps=6, state=LoopState(**saved), logits=logits)
        again.loop.ledger = replace(
            books, terms=Terms(devices=devices, price_per_device_hour=price), clock=SteadyClock()
        )
        again.run()
        seconds = [sum(row["step_time"] for row in rows) for rows in (first.rows, again.rows)]
        total, last = again.rows[-1], list(again.folder.eval.rows())[-1]["spent"]
        assert total["total/device_seconds"] == pytest.approx(seconds[0] + devices * seconds[1])
        assert 3600 * last["device_hours"] == pytest.approx(total["total/device_seconds"])
        assert ("money/USD" in last) == known  # steps without a price have cost nobody knows what
        money = 2.0 * seconds[0] + price * devices * seconds[1]
        assert 3600 * last.get("money/USD", 0.0) == pytest.approx(known * money)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from([0.0, 2.0, 3.0]), st.sampled_from("€$")), min_size=1
    )
)
def test_money_is_known_while_every_step_was_paid_in_one_currency(paid: list[tuple[int, float, str]]) -> None:
    totals: dict[str, float] = {}
    for devices, price, currency in paid:
        row = {"tokens/context": 0.0, "tokens/sampled": 1.0, "step_time": 1800.0}
        totals = add_totals(
            totals, row, Terms(devices=devices, price_per_device_hour=price, currency=currency)
        )
    known = len({currency for *_, currency in paid}) == 1 and all(price for _, price, _ in paid)
    money = {name: n for name, n in totals.items() if name.startswith(MONEY)}
    assert list(money) == [f"{MONEY}{paid[-1][2]}"] * known
    assert sum(money.values()) == pytest.approx(known * sum(n * price / 2 for n, price, _ in paid))
    assert totals.get("total/device_seconds", 0.0) == sum(n * 1800 for n, *_ in paid)


def test_the_parts_of_a_step_are_all_of_it() -> None:
    clock = Clock()
    with clock.doing("train", Kind.TRAIN):
        pass
    total, parts = clock.read()
    assert sum(parts.values()) == pytest.approx(total)
    assert set(clock.busy()) == {"sample", "grade", "train", "measure"}
    assert sum(clock.busy().values()) <= total


POOLS = {"samplers": 2, "trainer": 1}
WORKERS = ["sampler-0", "sampler-1", "trainer", "grader-0", "controller"]
spans = st.builds(
    lambda worker, kind, start, seconds: Span(worker=worker, kind=kind, start=start, stop=start + seconds),
    st.sampled_from(WORKERS),
    st.sampled_from(list(Kind)),
    st.floats(0, 9),
    st.floats(0, 5),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(spans, max_size=6), st.floats(0.1, 4)), max_size=6))
def test_pools_are_never_busier_than_they_can_be_and_no_second_is_lost(
    steps: list[tuple[list[Span], float]],
) -> None:
    """Spans that are told late are booked in the steps that have room for them."""
    over: dict[str, dict[str, float]] = {}
    booked = 0.0
    for told, seconds in steps:
        busy, over = busy_by_pool(told, over, POOLS, seconds)
        assert all(sum(parts.values()) <= seconds * (1 + 1e-9) for parts in busy.values())
        booked += sum(POOLS[pool] * sum(parts.values()) for pool, parts in busy.items())
        row = pipeline_row(busy, POOLS, seconds)
        assert 0 <= row["pipeline/utilisation"] <= 1
        assert row["pipeline/bubble_share"] == pytest.approx(1 - row["pipeline/utilisation"])
    booked += sum(POOLS[pool] * sum(parts.values()) for pool, parts in over.items())
    at_work = {Kind.PREFILL, Kind.DECODE, Kind.GRADE, Kind.PACK, Kind.TRAIN}
    told_s = sum(
        span.seconds
        for told, _ in steps
        for span in told
        if span.kind in at_work and pool_of(span.worker) in POOLS
    )
    assert booked == pytest.approx(told_s)


def test_groups_that_come_back_from_the_spool_are_paid_for_once(tmp_path: Path) -> None:
    """Killed in step 7, with the checkpoint of step 5. Step 6 is done again with groups that its first row
    has paid for; of step 7 two of four groups were finished, and no row has paid for them yet."""

    sizes = {"steps": 10, "checkpoint_every": 5, "flops": TEN_A_ROW}
    dies = Dies(lambda group: group.step == 7 and group.prompt.uid in ("p26", "p27"))
    killed = Bench(tmp_path, **sizes, grader=dies)
    with pytest.raises(Killed):
        killed.run()
    Bench(tmp_path, **sizes, **as_saved(killed)).run()
    whole = Bench(tmp_path.parent / f"{tmp_path.name}-whole", **sizes)
    whole.run()

    rows = read(killed.folder)
    found, straight = summary(rows), summary(read(whole.folder))
    assert [row["event"] for row in rows if row["event"] != "step"] == [
        *("start", "eval", "save", "lost", "end"),
        *("start", "eval", "save", "end"),
    ]
    sixth = [row for row in rows if row["event"] == "step" and row["step"] == 6]
    assert sixth[1]["reused"] == {"flops": sixth[0]["flops"]["sample"], **token_counts_of(sixth[0])}
    assert [row["step"] for row in rows if "reused" in row] == [6]
    assert (found.repeated, straight.repeated) == (1, 0)
    assert found.tokens == straight.tokens and found.dropped == {**straight.dropped, "repeated": 0}
    assert found.useful == straight.useful
    assert found.wasted == {**straight.wasted, "repeated": sixth[0]["flops"]["train"]}
    assert everything_of(found) == everything_of(straight) + sixth[0]["flops"]["train"]


def token_counts_of(row: dict[str, Any]) -> dict[str, int]:
    return {name: row["tokens"][name] for name in token_counts([])}


def everything_of(found: Summary) -> int:
    assert found.useful is not None and found.useful + sum(found.wasted.values()) == sum(found.flops.values())
    return sum(found.flops.values())
