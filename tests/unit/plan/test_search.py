"""The search finds the best of all that fits and says why the rest lost; ``ostinato plan`` as typed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_world import arrangement
from typer.testing import CliRunner

from ostinato.apps.plan import memory
from ostinato.apps.plan import search as planning
from ostinato.apps.plan.cluster import ON_GPUS, parse_cluster
from ostinato.apps.plan.commands import fitting, nothing_fits
from ostinato.apps.plan.layouts import layouts
from ostinato.apps.plan.problem import (
    Arrangement,
    Base,
    Phase,
    Placement,
    Problem,
    Setup,
    Times,
    Work,
    find_model,
)
from ostinato.apps.plan.request import Options, ask, lognormal_lengths
from ostinato.apps.plan.search import Allowed, Plan, search
from ostinato.apps.plan.time import Roofline
from ostinato.cli.app import app
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout
from ostinato.parallel.memory import Precision


class Toy:
    """A clock whose seconds are plain: more tensor ranks cost, more sequences help."""

    def phase(self, problem: Problem, phase: Phase, setup: Setup) -> Mapping[str, float]:
        layout = setup.layout
        if phase == Phase.ROLLOUT:
            return {"decode": 100 / (setup.sequences * layout.data) + 0.1 * layout.tensor}
        again = setup.recompute
        return {
            "products": 10.0 * (1 + again / 3),
            "tensor": float(layout.tensor - 1),
            "bubble": layout.pipeline - 1.0,
        }

    def step(self, problem: Problem, arrangement: Arrangement) -> Times:
        terms = {phase.value: self.phase(problem, phase, arrangement.setup(phase)) for phase in Phase}
        switch = 5.0 * (arrangement.base == Base.SWAPPED)
        return Times(terms=terms | {"switch": {"base": switch}})


def question(model: str = "qwen3-30b-a3b", gpus: str = "4xH100-80", **work: Any) -> Problem:
    return Problem(
        model=find_model(model),
        adapter=AdapterSpec(rank=16, alpha=32.0),
        precision=Precision(),
        work=Work(answers=lognormal_lengths(1024, 4096), max_answer=4096, **work),
        cluster=parse_cluster(gpus),
    )


def test_the_first_plan_is_the_best_of_all_pairs() -> None:
    """The twin: every setup of the trainer with every one of the sampler and every base."""
    case, clock = question(gpus="2xH100-80"), Toy()
    found = search(case, clock)
    best = min(every(case, clock), key=lambda plan: plan.times.total)
    assert found.plans[0].times.total == pytest.approx(best.times.total)
    totals = [plan.times.total for plan in found.plans]
    assert totals == sorted(totals)


def every(case: Problem, clock: Toy) -> list[Plan]:
    plans = []
    for train in layouts(case, case.cluster.num_gpus, Phase.TRAIN):
        for recompute in (False, True):
            if train.shard > 1 and not recompute:
                continue
            setup = Setup(layout=train, microbatch=5120, recompute=recompute)
            for rollout in layouts(case, case.cluster.num_gpus, Phase.ROLLOUT):
                for base in Base:
                    if base == Base.SHARED and memory.shares_base(case, setup, Setup(layout=rollout)):
                        continue
                    bare = Arrangement(train=setup, rollout=Setup(layout=rollout), base=base)
                    room = memory.memory(case, bare, Phase.ROLLOUT)
                    free = memory.margin(case, room) + room.terms["KV cache"]
                    slots = memory.sequences_for(case, bare.rollout, free)
                    full = replace(bare, rollout=replace(bare.rollout, sequences=slots))
                    sizes = {phase: memory.memory(case, full, phase) for phase in Phase}
                    if slots and all(memory.margin(case, one) >= 0 for one in sizes.values()):
                        plans.append(Plan(arrangement=full, memory=sizes, times=clock.step(case, full)))
    return plans


def test_every_plan_fits_in_every_phase() -> None:
    case = question("qwen3-30b-a3b", "2xH100-80")
    found = search(case, Roofline())
    assert found.plans
    for plan in found.plans:
        for phase, one in plan.memory.items():
            assert memory.margin(case, one) >= 0
            assert one.terms == memory.memory(case, plan.arrangement, phase).terms
            assert memory.host_margin(case, one) >= 0


def test_nothing_fits_is_no_plan_and_names_what_was_nearest() -> None:
    case = question("qwen3-235b-a22b", "2xRTX4090-24")
    found = search(case, Toy())
    assert not found.plans
    assert found.near[Phase.TRAIN].memory.total > memory.limit(case)


def test_more_memory_never_makes_a_plan_slower() -> None:
    case, clock = question("qwen3-30b-a3b", "2xH100-80"), Roofline()
    more = replace(case.cluster, gpu=replace(case.cluster.gpu, memory=2 * case.cluster.gpu.memory))
    tight, roomy = (search(replace(case, cluster=one), clock) for one in (case.cluster, more))
    assert roomy.plans[0].times.total <= tight.plans[0].times.total * 1.0001


def test_layouts_are_distinct_and_fit_the_model() -> None:
    case = question("kimi-k2", "64xH800-80")
    for phase in (Phase.TRAIN, Phase.ROLLOUT):
        found = list(layouts(case, 64, phase))
        assert len(found) == len(set(found)) > 10
        for layout in found:
            assert layout.world == 64
            layout.refuse(case.config)
            assert layout.tensor * layout.context <= 8
            assert phase == Phase.TRAIN or layout.pipeline == layout.context == layout.shard == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "adapter"),
    [
        ("qwen3-235b-a22b", "8xH200-141", AdapterSpec(rank=32, alpha=64.0)),
        ("qwen3-30b-a3b", "2x8xH100-80", None),
    ],
)
def test_what_fits_is_found(model: str, gpus: str, adapter: AdapterSpec | None) -> None:
    """The pair that fits may have one of the slowest trainers: the leanest are looked at, too."""
    case = replace(question(model, gpus), adapter=adapter, work=Work(answers=lognormal_lengths(4096, 16384)))
    allowed = Allowed(bases=(Base.TWO,))
    assert search(case, Roofline(), allowed).plans


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ({"train_layout": "t3"}, "train-layout: layout t3 cuts num_attention_heads"),
        ({"rollout_layout": "p4"}, "rollout-layout: layout p4 has p4, but vllm samples without it"),
        ({"rollout_layout": "d2f2t2"}, "rollout-layout: .* has f2"),
        ({"rollout_layout": "t4e2"}, "rollout-layout: .* over all ranks of an engine or none"),
        ({"train_layout": "d8"}, "train-layout is d8 of 8 ranks, but of 4 GPUs 4 train and 4 sample"),
        ({"train_layout": "d4", "rollout_layout": "d2"}, "and rollout-layout is d2 of 2 ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(requested: dict[str, str], words: str) -> None:
    given: dict[str, Any] = {name: Layout.parse(text) for name, text in requested.items()}
    allowed = Allowed(**given)
    with pytest.raises(ValueError, match=words) as caught:
        search(question(), Toy(), allowed)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_pairs_that_cannot_win_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that fit say when to stop, and all pairs together find nothing better."""
    seen, seated = [0], planning._fit_sampler

    def counted(*given: Any) -> Any:
        seen[0] += 1
        return seated(*given)

    monkeypatch.setattr(planning, "_fit_sampler", counted)
    case, allowed = question("qwen3-30b-a3b", "16xH100-80"), Allowed(bases=(Base.SHARED,))
    found, few = search(case, Roofline(), allowed), seen[0]
    monkeypatch.setattr(planning, "FINAL", 10**9)
    best = search(case, Roofline(), allowed)
    assert few < (seen[0] - few) / 2
    assert found.plans[0].times.total == best.plans[0].times.total


def test_apart_cuts_the_cluster_and_may_overlap() -> None:
    case = question(gpus="4xH100-80")
    found = search(case, Roofline(), Allowed(placements=(Placement.APART,), lag=1))
    assert found.plans
    for plan in found.plans:
        a = plan.arrangement
        assert a.placement == Placement.APART and a.num_gpus == 4
        assert plan.times.overlapped > 0
    both = search(case, Roofline(), Allowed(placements=tuple(Placement), lag=1))
    assert both.plans[0].times.total <= found.plans[0].times.total


@pytest.mark.parametrize(
    ("more", "fits", "starts"),
    [
        (["qwen3-30b-a3b", "--answer-tokens", "1024", "--max-answer", "4096"], 1, 1),  # one base of 61 GB
        (["qwen3-30b-a3b", "--answer-tokens", "1024", "--max-answer", "4096", "--share", "two"], 2, 2),
        (["qwen3-30b-a3b", "--engine", "vllm", "--max-answer", "8192"], 1, 2),
        (["kimi-k2", "--base", "fp8"], 16, None),
    ],
)
def test_smallest_is_the_first_size_that_fits_beside_the_first_that_starts(
    more: list[str], fits: int, starts: int | None
) -> None:
    """`--smallest` answered with plans that nobody can start, and did not say which number can be."""
    tree = json.loads(run("plan", *more, "--gpus", "64xH100-80", "--smallest", "--json", "-"))
    assert (tree["smallest"], tree["smallest_started"]) == (fits, starts)


# ---- what it is fed with


# ---- ``ostinato plan`` as a user types it


ARGUMENTS = ["plan", "qwen3-30b-a3b", "--gpus", "2xH100-80", "--lora-rank", "16", "--max-answer", "4096"]
SHORT = ["--answer-tokens", "1024"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout  # without the line that says what takes long


def test_tables_say_what_was_asked_what_won_and_why() -> None:
    reported = run(*ARGUMENTS, *SHORT)
    for words in (
        "qwen3-30b-a3b",
        "LoRA r=16",
        "binding",
        "base weights",
        "KV cache",
        "fragmentation",
        "2 is ",
    ):
        assert words in reported


@pytest.mark.parametrize(
    ("arguments", "ready"),
    [
        (["qwen3-8b", "--gpus", "1xH100-80"], True),
        (["qwen3-8b", "--gpus", "8x4090"], True),
        (
            ["qwen3-30b-a3b", "--gpus", "2xH100-80"],
            True,
        ),  # vLLM takes adapters on experts in a form of its own
        (["smollm2-135m", "--gpus", "1xH100-80", "--full", "--engine", "vllm"], False),
    ],
)
def test_plans_that_can_be_started_come_first(arguments: list[str], ready: bool) -> None:
    """The first five plans of most questions were "swapped", which no command of ours starts, without a mark;
    `--launch` printed the first of them."""
    tree = json.loads(run("plan", *arguments, *SHORT, "--json", "-"))
    lacks = [bool(one["lacks"]) for one in tree["plans"]]
    assert lacks == sorted(lacks) and lacks[0] is not ready and lacks[-1]
    seconds = [one["total"] for one in tree["plans"] if one["lacks"]]
    assert seconds == sorted(seconds)
    assert ("not in Ostinato yet" in run("plan", *arguments, *SHORT, "--launch")) is not ready
    printed = run("plan", *arguments, *SHORT)
    assert "cannot start" in printed and ON_GPUS in printed


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (599.4, "7.7% faster, but Ostinato cannot start it"),
        (649.4, "as fast"),
        (700.0, "7.8% slower: train x"),
    ],
)
def test_a_plan_that_comes_later_is_faster_or_slower_as_it_is(seconds: float, words: str) -> None:
    """A plan of 599.4 s was "as fast" as the first one, of 649.3 s, which was first for it can be started."""
    first, later = (
        Plan(arrangement=arrangement("1", "1"), memory={}, times=Times(terms={"train": {"x": s}}))
        for s in (649.3, seconds)
    )
    assert planning.why_lost(first, later).startswith(words)


def test_what_has_run_on_gpus_is_said_in_the_same_words() -> None:
    root = Path(__file__).parents[3]
    for page in ("README.md", "docs/index.md"):
        assert ON_GPUS in (root / page).read_text(encoding="utf-8"), page


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("allenai/OLMoE-1B-7B-0924", "olmoe"),
        ("qwen2.5-7b", None),
        ("Qwen/Qwen2.5-7B-Instruct", None),
        ("gpt-oss-20b", None),
    ],
)
def test_another_model_is_not_offered_as_a_misspelling(name: str, found: str | None) -> None:
    """`plan qwen2.5-7b` asked "did you mean qwen3-8b"; the hub's name of a built-in model was not known."""
    if found:
        assert (find_model(name).name, find_model(name).path) == (found, name)
        return
    with pytest.raises(ValueError, match=r"give its config\.json") as caught:
        find_model(name)
    assert "did you mean" not in str(caught.value)


def test_advice_names_what_there_is() -> None:
    """ "fewer bytes (--base fp8)" was advised, and the trainer holds bf16 or float32 only."""
    assert "fp8" not in refusal("qwen3-30b-a3b", "1xRTX4090", Options())
    words = refusal("qwen3-30b-a3b", "1xH100", Options(full=True))
    assert words.endswith("use 8 of them, a smaller --max-answer or adapters (without --full)")


def refusal(model: str, gpus: str, options: Options) -> str:
    request = ask(model, gpus, options)
    ranking = search(request.problem, request.clock, request.allowed)
    assert not ranking.plans
    return nothing_fits(request, ranking, model, options)


def test_where_a_number_does_not_divide_the_model_fewer_may_fit() -> None:
    """ "use more GPUs" was said of 40 for 384 experts, and 32 fit. Here 8 heads are not cut by 5."""
    options = Options(gpu_memory=12.0, max_answer=4096, answer_tokens=1024)
    assert "; use 4 or 8 of them, " in refusal("qwen3-8b", "5xRTX3090-24", options)


def test_a_layout_that_cannot_be_is_refused_whatever_the_number() -> None:
    options = Options(train_layout="t3")
    with pytest.raises(ValueError, match="train-layout: layout t3 cuts num_attention_heads"):
        next(fitting(ask("qwen3-8b", "8xH100", options), "qwen3-8b", options, range(1, 9)))


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    raw = dict(find_model("qwen3-8b").config.raw)
    (folder / "config.json").write_text(json.dumps(raw))
    assert "mine: 8.19B" in run("plan", str(folder), "--gpus", "2xH100-80")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--share", "half"], "--share has 'half'"),
        (["--placement", "near"], "--placement is 'near'"),
        (["--engine", "x"], "--engine is 'x'"),
        (["--answer-tokens", "9999"], "answer-tokens is 9999"),
        (["--train-layout", "q2"], "layout is 'q2'"),
        (["--train-layout", "t3"], "train-layout: layout t3 cuts"),
        (["--rollout-layout", "d1c2"], "rollout-layout: layout c2 has c2"),
        (["--rollout-layout", "d4"], "rollout-layout is d4 of 4 ranks, but of 2 GPUs 2 train and 2 sample"),
        (["--launch", "--json", "-"], "--launch and --json - both write"),
        (["--gpus", "many"], "gpus is 'many'"),
        (["--answers", "/nowhere.json"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(more: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        run(*ARGUMENTS, *SHORT, *more)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"train misses by .* GB at best .*base weights"):
        run("plan", "kimi-k2", "--gpus", "8xH100-80")


@pytest.mark.slow
def test_planning_loads_no_torch() -> None:
    code = (
        "import sys\nfrom ostinato.cli.app import app\n"
        "try:\n    app(['plan', 'qwen3-8b', '--gpus', '2xH100-80', '--json', '-'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules), 'heavy'\n"
        "print('light', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stderr.strip().endswith("light"), done.stderr


def test_a_card_that_is_not_in_the_table_has_a_memory_of_its_own() -> None:
    request = ask("qwen3-8b", "4xA100-80", Options(gpu_memory=40.0))
    assert memory.limit(request.problem) == 40e9
    assert request.problem.cluster.gpu.hbm == parse_cluster("A100-80:4").gpu.hbm


def test_the_answer_says_what_its_numbers_are() -> None:
    """ "85.4 of 85.5 GB" was no tight fit but a cache that takes what is free; "25.3 of 25 GB" was the same
    memory twice; rows were tokens; a range, its spread and shares of peaks were printed nowhere."""
    arguments = ["qwen3-8b", "--gpus", "1xRTX4090-24", "--max-answer", "40000", "--rollout-layout", "1"]
    with pytest.raises(ValueError, match="train misses by"):
        run("plan", *arguments)
    printed = run("plan", *arguments, "--gpu-memory", "200")
    cache = 41024 * 147_456 / 1e9  # one longest sequence
    assert f"the KV cache takes 147.0 of what is free and needs {cache:.1f} at least" in printed
    assert "may be 41,024 tokens and qwen3-8b takes 40,960" in printed
    for words in ("tokens, recomputed", "range", "rollout 25%", "grouped 0.4", "85% of it used"):
        assert words in printed
    assert "rows" not in printed and "warning" not in run(*ARGUMENTS, *SHORT)


def test_money_is_devices_times_hours() -> None:
    first = json.loads(run(*ARGUMENTS, *SHORT, "--json", "-", "--price", "3"))["plans"][0]
    assert first["cost_per_step"] == pytest.approx(2 * 3 * first["total"] / 3600)
    assert first["cost_of_run"] == pytest.approx(1000 * first["cost_per_step"])
