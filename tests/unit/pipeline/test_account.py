"""The account of a step: what it computed, which tokens were in vain and why; who pays for what, and once."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode
from nouns import group_of as group
from small_loop import TEN_A_ROW, Bench, IsRight, Killed, send

from ostinato.every import MONEY
from ostinato.model.flops import FlopModel, Part, Rates
from ostinato.observe.ledger import Ledger, SteadyClock, Summary, Terms, read, spent, summary
from ostinato.observe.timeline import Kind, Span, pool_of
from ostinato.pipeline.account import (
    add_totals,
    compute_pipeline_row,
    compute_step_flops,
    convert_flops,
    count_tokens,
    count_trained_tokens,
    split_busy_seconds,
)
from ostinato.pipeline.credit import Credit
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.rollout.health import count_sampled_tokens
from ostinato.run import RunFolder
from ostinato.types import Batch, Group, Microbatch, Reward, Segment, StepReport, Trajectory

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
    return Credit(
        advantages=[], samples=[], weights=[], dropped_groups=Counter(), wasted_tokens=Counter(wasted)
    )


def report(**metrics: float) -> StepReport:
    usual = {"optimizer_steps": 1.0, "refused_steps": 0.0}
    return StepReport(metrics={**usual, **{name.replace("__", "/"): n for name, n in metrics.items()}})


def test_a_step_by_hand() -> None:
    """Two answers of 8 to a prompt of 5, which is read once but for its last token; two drafts failed."""
    groups = [group(answer(8, drafted=3, accepted=1), answer(8))]
    flops = compute_step_flops(TEN, groups, batch(12, 8), report(passes__measure=2.0))
    assert flops == {"sample": (12 + 1 + 7) * 10, "train": 360, "measure": 240}
    assert convert_flops(flops) == {"flops/rollout": 200, "flops/train": 360, "flops/measure": 240}


def test_what_the_engine_ran_again_is_counted_in_tokens() -> None:
    """Preempted after 9 of its rows, of which 5 were still cached."""
    one = answer(8)
    done_ = replace(one.turns[0].completion, recomputed=np.array([[5, 9]], np.int32))
    groups = [group(replace(one, turns=(replace(one.turns[0], completion=done_),)))]
    assert compute_step_flops(TEN, groups, batch(12, 8), report())["sample"] == 120
    assert count_tokens(groups)["recomputed"] == 4


def test_further_passes_are_training() -> None:
    """Looking for the samples at fault of a refused step ran half of the batch once more."""
    groups, made = [group(answer(8))], batch(12, 8)
    assert compute_step_flops(TEN, groups, made, report(passes__extra=1.0))["train"] == 360 + 120
    refused = report(refused_steps=1.0, optimizer_steps=1.0, passes__repeated=0.5)
    assert compute_step_flops(TEN, groups, made, refused) == {"sample": 120, "train": 360 + 180, "measure": 0}


def test_tokens_of_a_refused_step_have_trained_nothing(tmp_path: Path) -> None:
    """The ledger had all of them as trained, while none of their FLOPs was useful."""
    bench = Bench(tmp_path, steps=3, flops=TEN_A_ROW)
    bench.trainer.refuse = True
    bench.run()
    found = summary(read(bench.folder))
    assert found.tokens["trained"] == 0
    assert found.tokens["sampled"] == sum(found.dropped.values()) and found.dropped["refused_step"] > 0
    assert [row["tokens/trained"] for row in bench.rows] == [0, 0, 0]
    assert bench.rows[-1]["total/trained_tokens"] == 0
    assert all(row["tokens/wasted"] == row["tokens/sampled"] for row in bench.rows)
    half = report(refused_steps=1.0, optimizer_steps=1.0)
    assert count_trained_tokens(credit(truncated=3), batch(12, 9), half) == (
        5,
        {"truncated": 3, "refused_step": 4},
    )


def test_device_seconds_and_money_are_those_of_the_devices_and_prices_of_each_step(tmp_path: Path) -> None:
    """They were all seconds so far, times the devices of now."""
    accounts = Ledger(folder=RunFolder(tmp_path), terms=Terms(price_per_device_hour=2.0))
    first = Bench(tmp_path, steps=6)
    first.loop.ledger = accounts
    send(first, signal.SIGINT, after_steps=2)
    first.run()
    saved, logits = first.saved[-1]
    for devices, price, known in ((8, 3.0, True), (1, 0.0, False)):
        again = Bench(tmp_path, steps=6, state=LoopState(**saved), logits=logits)
        again.loop.ledger = replace(
            accounts, terms=Terms(devices=devices, price_per_device_hour=price), clock=SteadyClock()
        )
        again.run()
        seconds = [sum(row["step_time"] for row in rows) for rows in (first.rows, again.rows)]
        total, last = again.rows[-1], list(again.folder.eval.rows())[-1]["spent"]
        assert total["total/device_seconds"] == pytest.approx(seconds[0] + devices * seconds[1])
        assert 3600 * last["device_hours"] == pytest.approx(total["total/device_seconds"])
        assert ("money/USD" in last) == known  # steps without a price have an unknown cost
        money = 2.0 * seconds[0] + price * devices * seconds[1]
        assert 3600 * last.get("money/USD", 0.0) == pytest.approx(known * money)


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


POOLS = {"samplers": 2, "trainer": 1}
WORKERS = ["sampler-0", "sampler-1", "trainer", "grader-0", "controller"]
spans = st.builds(
    lambda worker, kind, start, seconds: Span(worker=worker, kind=kind, start=start, stop=start + seconds),
    st.sampled_from(WORKERS),
    st.sampled_from(list(Kind)),
    st.floats(0, 9),
    st.floats(0, 5),
)


@given(st.lists(st.tuples(st.lists(spans, max_size=6), st.floats(0.1, 4)), max_size=6))
def test_pools_are_never_too_busy_and_no_second_is_lost(steps: list[tuple[list[Span], float]]) -> None:
    """Spans that are reported late are booked in the steps that have room for them."""
    over: dict[str, dict[str, float]] = {}
    booked = 0.0
    for reported, seconds in steps:
        busy, over = split_busy_seconds(reported, over, POOLS, seconds)
        assert all(sum(parts.values()) <= seconds * (1 + 1e-9) for parts in busy.values())
        booked += sum(POOLS[pool] * sum(parts.values()) for pool, parts in busy.items())
        row = compute_pipeline_row(busy, POOLS, seconds)
        assert 0 <= row["pipeline/utilisation"] <= 1
        assert row["pipeline/bubble_share"] == pytest.approx(1 - row["pipeline/utilisation"])
    booked += sum(POOLS[pool] * sum(parts.values()) for pool, parts in over.items())
    at_work = {Kind.PREFILL, Kind.DECODE, Kind.GRADE, Kind.PACK, Kind.TRAIN}
    told_s = sum(
        span.seconds
        for reported, _ in steps
        for span in reported
        if span.kind in at_work and pool_of(span.worker) in POOLS
    )
    assert booked == pytest.approx(told_s)


# ---- what the loop accounts: groups from the spool once, whichever process played them; evaluation apart


SIZES: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "prompts_per_step": 2, "group_size": 4}
TOKENS = 4 * 2  # sampled in a group


class Dies(IsRight):
    """Killed at these prompts of a step; notes what was graded, and so was really sampled."""

    def __init__(self, step: int = 0, *uids: str) -> None:
        super().__init__()
        self.step, self.uids, self.graded = step, uids, 0

    async def grade(self, group: Group) -> list[Reward]:
        if group.step == self.step and group.prompt.uid in self.uids:
            raise Killed
        self.graded += group.prompt.uid.startswith("p")
        return await super().grade(group)


def lives(path: Path, graders: Sequence[Dies], stages: Sequence[str], **changes: Any) -> Bench:
    """One process after another, each from the last checkpoint."""
    state, logits = None, None
    for grader, stage in zip(graders, stages, strict=True):
        bench = Bench(path, **SIZES, **changes, flops=TEN_A_ROW, state=state, logits=logits, grader=grader)
        bench.loop.stage = replace(bench.loop.stage, identity=stage)
        with suppress(Killed):  # not where the groups to die at come from the spool
            bench.run()
        if bench.saved:
            saved, logits = bench.saved[-1]
            state = LoopState(**saved)
    return bench


def adds_up(bench: Bench, graders: Sequence[Dies], ahead: int = 0) -> None:
    """What the ledger says was sampled is what was graded, but for groups that a kill kept from any row."""
    found = summary(read(bench.folder))
    really = sum(grader.graded for grader in graders) * TOKENS
    assert found.tokens["sampled"] == found.tokens["trained"] + sum(found.dropped.values())
    assert really - 2 * (1 + ahead) * (len(graders) - 1) * TOKENS <= found.tokens["sampled"] <= really
    assert min(found.dropped.values()) >= 0


def test_a_row_of_the_same_step_may_be_one_of_other_groups(tmp_path: Path) -> None:
    """Session 1 had a row of step 3. Session 2 went on with other rewards, played a group of step 3 anew and
    was killed. Session 3 took it from the spool, saw the row of step 3, and deducted its tokens and FLOPs,
    which no row had ever paid for."""
    graders = [Dies(4, "p7"), Dies(3, "p5"), Dies()]
    bench = lives(tmp_path, graders, ["", "others", "others"])
    third = [row for row in read(bench.folder) if row["event"] == "step" and row["session"] == 3]
    assert bench.rows[0]["rollout/from_spool"] == 1
    assert third[0]["tokens"]["sampled"] == 2 * TOKENS  # whose process had no row for it
    adds_up(bench, graders)


def test_who_takes_up_unpaid_groups_has_paid_for_them(tmp_path: Path) -> None:
    """Session 1 is killed in step 3 with one of two groups in the spool. Session 2 finishes the step with it,
    so its row pays for both, and is killed in step 4. Session 3 owes nothing for step 3."""
    graders = [Dies(3, "p5"), Dies(4, "p6", "p7"), Dies()]
    bench = lives(tmp_path, graders, ["", "", ""])
    rows = {(row["session"], row["step"]): row for row in read(bench.folder) if row["event"] == "step"}
    assert (rows[2, 3]["tokens"]["sampled"], rows[3, 3]["tokens"]["sampled"]) == (2 * TOKENS, 0)
    found = summary(read(bench.folder))
    assert found.tokens["sampled"] == sum(grader.graded for grader in graders) * TOKENS == 8 * TOKENS
    adds_up(bench, graders)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 1), st.booleans()), min_size=1, max_size=3),
    st.sampled_from([0, 1, 3]),
)
def test_however_it_is_killed_and_changed(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, int, bool]], staleness: int
) -> None:
    graders = [Dies(step, f"p{2 * step - 2 + place}", f"p{2 * step - 1}") for step, place, _ in kills]
    graders.append(Dies())
    stages = ["", *("others" if changed else "" for *_, changed in kills)]
    path = tmp_path_factory.mktemp("run") / "run"
    adds_up(lives(path, graders, stages, staleness=staleness), graders, staleness)


def test_sigterm_in_an_evaluation_is_no_compute_of_training(tmp_path: Path) -> None:
    """What a grace period ends is lost; where that was an evaluation, the hours of training had it all the
    same, and every forecast on them."""

    class Stuck(IsRight):
        async def grade(self, group: Group) -> list[Reward]:
            if group.prompt.uid == "e3":
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
                await asyncio.sleep(60)
            return await super().grade(group)

    bench = Bench(tmp_path, grader=Stuck(), grace_s=0.1)
    assert bench.run().why == "terminated"
    rows = read(bench.folder)
    assert [row["event"] for row in rows] == ["start", "end"]
    assert rows[1]["part"] == "eval" and rows[1]["seconds"] > 0.1
    assert summary(rows).evaluation.seconds == rows[1]["seconds"] == summary(rows).wall["lost"]
    wall = summary(rows).wall
    assert 3600 * summary(rows).compute["hours"] == pytest.approx(sum(wall.values()) - wall["lost"])
    assert spent(rows, "hours") == {0: 0}


# ---- sampling ahead is paid for by the step that does it, and judged by the step that trains on it


class Counts(IsRight):
    """A grader that knows what was really sampled, by the step that was to come when it was; it dies at the
    ``dies``-th group."""

    def __init__(self, dies: int = 0) -> None:
        super().__init__()
        self.bench: Bench | None = None
        self.sampled, self.left = Counter[int](), dies

    async def grade(self, group: Group) -> list[Reward]:
        assert self.bench is not None
        self.left -= 1
        if self.left == 0:
            raise Killed
        if group.prompt.uid.startswith("p"):  # and not held out
            now = self.bench.loop.state.step + 1
            self.sampled[now] += sum(map(count_sampled_tokens, group.trajectories))
        return await super().grade(group)


def counted(path: Path, dies: int = 0, **changes: Any) -> tuple[Bench, Counts]:
    grader = Counts(dies)
    bench = Bench(path, grader=grader, flops=TEN_A_ROW, max_empty_steps=99, **changes)
    grader.bench, bench.trainer.lr = bench, 0.5
    return bench, grader


def each_row_adds_up(rows: list[dict[str, Any]]) -> Summary:
    """In sum."""
    found = summary(rows)
    assert found.tokens["sampled"] == found.tokens["trained"] + sum(found.dropped.values())
    assert min(0, *found.dropped.values()) == 0
    return found


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.integers(1, 5), st.integers(1, 6))
def test_compute_is_counted_when_the_device_computes_it(staleness: int, steps: int, ends: int) -> None:
    """Sampling was booked by the step that trained on it: with a staleness of 8, a run that its forecast
    ended after step 4 had sampled 768 tokens, of which the ledger had 256, and the time of all of them.
    Evaluations lacked up to 8 rounds of compute, in favour of a loop that plays ahead."""
    with tempfile.TemporaryDirectory() as folder:
        bench, grader = counted(Path(folder), staleness=staleness, steps=steps, eval_every=1)
        bench.observer.should_stop = lambda step: step >= ends
        why = bench.run().why
        rows = read(bench.folder)
        found = each_row_adds_up(rows)
        of_steps = {row["step"]: row["tokens"]["sampled"] for row in rows if row["event"] == "step"}
        assert of_steps == {step: grader.sampled[step] for step in of_steps}
        by_step, flops, tokens = 0, spent(rows, "flops"), spent(rows, "tokens")
        for row in bench.folder.eval.rows():
            by_step += grader.sampled[row["step"]]
            assert row["spent"]["tokens"] == by_step == tokens[row["step"]]
            assert row["spent"]["flops"] == flops[row["step"]]
        ahead = min(staleness, steps - bench.loop.state.step) * (why is Finish.ENOUGH)
        assert found.dropped.get("unused", 0) == ahead * 4 * 8 * 2  # prompts x answers x tokens


@pytest.mark.parametrize("lose_spool", [False, True])
def test_killed_with_rounds_ahead(tmp_path: Path, lose_spool: bool) -> None:
    """Killed in step 7, with the checkpoint of step 5. What was ahead then comes from the spool and is no
    sampling of the new process; where the spool is gone it is played anew, and what was ahead is unused."""
    sizes = {"steps": 10, "checkpoint_every": 5, "staleness": 2}
    killed, before = counted(tmp_path / "killed", dies=8 + 4 * 8 + 3, **sizes)  # held out, steps 1 to 6
    with pytest.raises(Killed):
        killed.run()
    saved, logits = killed.saved[-1]
    if lose_spool:
        (killed.folder.path / "inflight.jsonl.zst").unlink()
    again, after = counted(tmp_path / "killed", state=LoopState(**saved), logits=logits, **sizes)
    again.run()
    whole, _ = counted(tmp_path / "whole", **sizes)
    whole.run()
    found, straight = each_row_adds_up(read(again.folder)), each_row_adds_up(read(whole.folder))
    assert (found.repeated, found.dropped.get("unused", 0)) == (1, 3 * 64 * lose_spool)
    in_vain = before.sampled[7] * lose_spool  # of the step that was killed: finished groups that no row has
    assert found.tokens["sampled"] == (before.sampled + after.sampled).total() - in_vain
    if not lose_spool:
        assert found.tokens == straight.tokens
        twice = next(row for row in read(killed.folder) if row.get("step") == 6 and row["event"] == "step")
        repeated = sum(twice["flops"].values()) - twice["flops"]["sample"]
        assert sum(found.flops.values()) == sum(straight.flops.values()) + repeated
        assert again.rows[-1]["total/sampled_tokens"] == whole.rows[-1]["total/sampled_tokens"]
