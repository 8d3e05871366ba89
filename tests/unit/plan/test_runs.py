"""Plans of runs: launch files, what is recorded, what runs teach later plans, placements."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_world import arrangement, problem
from typer.testing import CliRunner

from ostinato.apps.plan import launch
from ostinato.apps.plan.commands import place_experts, plan_json
from ostinato.apps.plan.fit import (
    FILE,
    IN_TURNS,
    OVERLAPPED,
    Factors,
    Part,
    factors_file,
    fit,
    parts_of,
    read_factors,
    write_factors,
)
from ostinato.apps.plan.memory import cache_bytes, memory
from ostinato.apps.plan.problem import Base, Phase, Sampler, Work
from ostinato.apps.plan.request import PlanRequest
from ostinato.apps.plan.search import Allowed, Plan
from ostinato.apps.plan.time import Roofline, step_traffic
from ostinato.cli.app import app
from ostinato.config import Recipe, dump_toml
from ostinato.model.shapes import AdapterSpec
from ostinato.observe import figures as shown
from ostinato.observe.figures import compare_plan
from ostinato.observe.rows import RunRows
from ostinato.parallel.load import expert_loads, measure_imbalance
from ostinato.parallel.memory import DType, Precision
from ostinato.parallel.placement import owner_of, place_contiguously, read_placement
from ostinato.routes import routes_to_json
from ostinato.run import RunFolder

WORK = Work(prompts=64, group=16, prompt_tokens=1024, answers=(2048,), max_answer=8192, updates=2, steps=300)
KIMI = problem("kimi-k2", "64xH800-80", adapter=AdapterSpec(rank=32, alpha=64.0), work=WORK)
PLAN = arrangement("p8t8e8", "d8t8e64", base=Base.SWAPPED)
PLAN = replace(PLAN, train=replace(PLAN.train, recompute=True))


OURS = """\
# trainer t8p8e8, sampler d8t8e64, colocated, base swapped
"""


def test_ours_is_a_recipe() -> None:
    text = launch.ostinato(KIMI, PLAN)
    assert text.startswith(OURS)
    recipe = Recipe.model_validate(tomllib.loads(text))
    assert (recipe.parallel.layout, recipe.model.path) == ("t8p8e8", "moonshotai/Kimi-K2-Instruct")
    assert (recipe.adapter.rank, recipe.trainer.minibatches, recipe.trainer.recompute) == (32, 2, True)
    assert (recipe.rollout.prompts_per_step, recipe.rollout.group_size) == (64, 16)


def test_ours_names_what_a_plan_has_not() -> None:
    """A recipe without [task] learned arithmetic and did not say so, and its model.path was refused."""
    text = launch.ostinato(KIMI, PLAN)
    filled = tomllib.loads(text.replace("# [", "[").replace("# source", "source").replace("# func", "func"))
    recipe = Recipe.model_validate(filled)
    assert (recipe.task.source, recipe.reward.functions) == ("rows.jsonl", ("exact",))
    assert "without it the run learns the built-in arithmetic" in text


def lacking(text: str) -> str:
    """The comments of a recipe, unwrapped."""
    return "\n".join(line for line in text.replace("\n#   ", " ").splitlines() if line.startswith("#"))


def recipe_of(text: str) -> Recipe:
    return Recipe.model_validate(tomllib.loads(text))


def test_ours_starts_the_engine_that_was_planned() -> None:
    text = launch.ostinato(KIMI, PLAN)
    engine = recipe_of(text).engine
    assert (engine.backend, engine.max_batch) == ("vllm", 32)
    sizes = "--tensor-parallel-size 8 --data-parallel-size 8 --enable-expert-parallel"
    assert engine.server_args == (*sizes.split(),)
    assert engine.kv_memory_mb != "auto"
    assert 0 <= (engine.kv_memory_mb << 20) - cache_bytes(KIMI, PLAN.rollout) < 1 << 20
    one = replace(problem(gpus="1xcpu"), sampler=Sampler(name="local", latent_kv=False))
    text = launch.ostinato(one, arrangement("1", "1"))
    assert recipe_of(text).engine.backend == "local"
    assert "not in Ostinato yet" not in text  # one process: one base is mapped


def test_ours_says_what_ostinato_has_not() -> None:
    stated = lacking(launch.ostinato(KIMI, PLAN))
    assert "not in Ostinato yet: a base that waits in host memory" in stated
    assert "not in Ostinato yet: a vLLM server over hosts: start its 64 ranks by hand" in stated
    narrow = Precision(base=DType.FP8, sampler=DType.FP8)
    host = replace(PLAN, base=Base.SHARED)
    text = launch.ostinato(replace(KIMI, precision=narrow), host)
    assert "a base in fp8: the trainer holds it in bf16" in lacking(text)
    assert "one copy of the base on GPUs for trainer and sampler" in lacking(text)
    assert recipe_of(text).model.dtype == "bfloat16"
    assert recipe_of(text).engine.server_args[-2:] == ("--quantization", "fp8")
    int4 = replace(KIMI, precision=Precision(sampler=DType.INT4))
    assert "words for vLLM's weights in int4" in lacking(launch.ostinato(int4, PLAN))


def test_the_local_engine_is_one_process_and_may_have_a_copy() -> None:
    ours = replace(problem(gpus="4xH100-80"), sampler=Sampler(name="local", latent_kv=False))
    text = launch.ostinato(ours, arrangement("d4e4", "d4"))
    assert "4 samplers of our own beside one trainer: one process samples" in lacking(text)
    eight = replace(ours, precision=Precision(sampler=DType.INT8))
    assert recipe_of(launch.ostinato(eight, arrangement("1", "1"))).engine.weights == "int8"
    full = replace(eight, adapter=None)
    assert "sampler weights in int8" in lacking(launch.ostinato(full, arrangement("1", "1")))


# ---- a plan on disk, and what a report and a calibration make of it beside the metrics of a run


ONE, CHOSEN = problem(), arrangement("d8t2", "d16")


def planned(**more: Any) -> dict[str, Any]:
    found = {phase: memory(ONE, CHOSEN, phase) for phase in Phase}
    plan = Plan(arrangement=CHOSEN, memory=found, times=Roofline().step(ONE, CHOSEN))
    request = PlanRequest(problem=ONE, allowed=Allowed(), clock=Roofline(), measured="")
    return plan_json(request, plan) | more


def folder(path: Path, plan: dict[str, Any], steps: int = 4) -> RunFolder:
    """A run of the plan that takes twice as long to train as it was planned to."""
    run = RunFolder.create(path, 'name = "planned"\n')
    (path / FILE).write_text(json.dumps(plan))
    train = sum(sum(plan["seconds"][phase].values()) for phase in ("train", "logprobs", "refit"))
    rollout = sum(plan["seconds"]["rollout"].values())
    for step in range(1, steps + 1):
        slow = 10.0 if step == 1 else 1.0  # the first one warms up
        row = {"time/train_s": 2 * train * slow, "time/rollout_s": rollout * slow, "step_time": 30.0}
        row |= {f"comm/bytes/{name}": sent for name, sent in plan["traffic"].items()}
        run.write(step, row)
    return run


def test_the_report_measures_what_a_fit_learns_from() -> None:
    """Training had been compared with the plan's without the publish that is in it."""
    assert shown.IN_TURNS == IN_TURNS and shown.OVERLAPPED == OVERLAPPED


def test_a_run_without_a_plan_or_with_a_damaged_one_is_reported(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", planned())
    table = compare_plan(RunRows(run).read())
    assert table is not None and any(
        name.startswith("train") and cells[2] == "2.00" for name, *cells in table.rows
    )
    (run.path / FILE).write_text("{")
    data = RunRows(run).read()
    assert compare_plan(data) is None and "plan.json cannot be read" in data.damage[-1]
    odd = {"seconds": {"train": 3, "rollout": {"decode": "x"}}, "traffic": {"a/b": None}, "layouts": 1}
    data.plan = odd
    assert compare_plan(data) is not None


def test_what_is_planned_to_be_sent_has_old_logprobs_in_it() -> None:
    """They are counted in a step's metrics, too; of a single optimizer step there are none."""
    twice = replace(ONE, work=replace(ONE.work, updates=2))
    one, both = step_traffic(ONE, CHOSEN), step_traffic(twice, CHOSEN)
    key = ("all_gather", "t")
    assert (
        1.2 * one[key].bytes < both[key].bytes < 1.5 * one[key].bytes
    )  # half of the rows once more, forward


# ---- ``ostinato plan fit``: runs that took so many times longer teach later plans


ARGS = ["plan", "qwen3-8b", "--gpus", "4xH100-80", "--prompts", "32", "--max-answer", "4096"]
ARGS += ["--answer-tokens", "512", "--train-layout", "d4"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def reported(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    return done.stdout  # without the line that says what takes long


def slow_run(folder: Path, times: float) -> RunFolder:
    """A run that was planned, and takes so many times longer than its plan says."""
    run = RunFolder.create(folder, 'name = "planned"\n\n[parallel]\nlayout = "d4"\n')
    reported(*ARGS, "--record", str(folder))
    seconds = json.loads((folder / FILE).read_bytes())["seconds"]
    took = {phase: times * sum(terms.values()) for phase, terms in seconds.items()}
    train = took["train"] + took["logprobs"] + took["refit"]
    for step, slow in ((1, 9.0), (2, 1.0), (3, 1.0)):  # the first one warms up
        run.write(step, {"time/rollout_s": slow * took["rollout"], "time/train_s": slow * train})
    return run


def changed(run: RunFolder, **more: Any) -> RunFolder:
    plan = json.loads((run.path / FILE).read_bytes()) | more
    (run.path / FILE).write_text(json.dumps({name: one for name, one in plan.items() if one is not None}))
    return run


def seconds_of_a_step() -> tuple[str, float]:
    found = json.loads(reported(*ARGS, "--json", "-"))
    return found["question"]["efficiency"], found["plans"][0]["total"]


def test_runs_teach_later_plans(tmp_path: Path) -> None:
    run, before = slow_run(tmp_path / "run", 2.0), seconds_of_a_step()
    assert "nothing measured" in before[0]
    stated = reported("plan", "fit", str(run.path))
    assert stated.count("2.00 times") == 2 and "kept for later plans of H100-80: rollout 2.00" in stated
    after = seconds_of_a_step()
    assert after == ("data sheets, phases by factors of 1 runs", pytest.approx(2 * before[1], rel=0.01))


def test_factors_that_a_plan_was_made_with_are_divided_out(tmp_path: Path) -> None:
    """A run whose plan had been right gave factors of 1, and the next plan forgot what was known."""
    reported("plan", "fit", str(slow_run(tmp_path / "run", 2.0).path))
    right = slow_run(tmp_path / "other", 1.0)
    reported("plan", "fit", str(right.path))
    found = read_factors(factors_file("H100-80"))
    assert found is not None and set(found.phases) >= {"rollout", "train", "refit"}
    assert all(factor == pytest.approx(2.0) for factor in found.phases.values())


def test_of_several_runs_the_median_counts() -> None:
    parts = [
        Part(run=f"{n}", name="train", phases=("train", "refit"), planned=1.0, measured=measured)
        for n, measured in enumerate((1.0, 2.0, 9.0))
    ]
    assert fit(parts) == Factors(phases={"train": 2.0, "refit": 2.0}, runs=3)


def test_of_overlap_only_the_trainer_and_what_it_publishes_teach(tmp_path: Path) -> None:
    """time/rollout_s is what the trainer waited then; on the same devices it is slowed down itself."""
    run = slow_run(tmp_path / "run", 1.0)
    for step in (4, 5):
        run.write(step, {"time/rollout_s": 1.0, "time/train_s": 2.0, "time/publish_s": 0.5})
    found = parts_of(changed(run, placement="apart"))
    assert [(part.name, part.phases) for part in found] == [
        ("train", ("train", "logprobs")),
        ("refit", ("refit",)),
    ]
    with pytest.raises(ValueError, match=r"samples while it trains.* without pipeline\.overlap"):
        parts_of(changed(run, placement="colocated"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"layouts": {"train": "t4"}}, "trains under layout d4 and its plan is of t4"),
        ({"tokens": None}, "cannot be read"),
        ({"tokens": 1.0}, "samples 99 tokens a step and its plan is of 1"),
        ({"sampler": "local"}, "samples by vllm and its plan is of local"),
    ],
)
def test_a_run_that_teaches_nothing_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    run = slow_run(tmp_path / "run", 1.0)
    run.recipe.write_text('name = "x"\n[parallel]\nlayout = "d4"\n[engine]\nbackend = "vllm"\n')
    if "tokens" in more:
        run.write(4, {"tokens/sampled": 99})
    with pytest.raises(ValueError, match=words):
        parts_of(changed(run, **more))


def test_devices_of_several_kinds_and_folders_without_a_plan_are_refused(tmp_path: Path) -> None:
    one, other = slow_run(tmp_path / "one", 1.0), changed(slow_run(tmp_path / "other", 1.0), device="cpu")
    with pytest.raises(ValueError, match="planned for H100-80 and cpu; fit the runs of one kind"):
        reported("plan", "fit", str(one.path), str(other.path))
    (one.path / FILE).write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json is no JSON .*; plan the run anew"):
        reported("plan", "fit", str(one.path))
    (one.path / FILE).unlink()
    with pytest.raises(ValueError, match=r"plan\.json does not exist; plan the run first, with --record"):
        reported("plan", "fit", str(one.path))


def test_what_is_no_file_of_factors_is_not_used() -> None:
    file = factors_file("H100-80")
    write_factors(Factors(phases={"train": 2.0}, runs=1), file)
    assert read_factors(file) == Factors(phases={"train": 2.0}, runs=1)
    for text in ("{", '{"factors": {}}', '{"phases": {"train": -1}, "runs": 1}'):
        file.write_text(text)
        assert read_factors(file) is None


# ---- ``ostinato place``: from recorded routes to a file that ``parallel.placement`` takes


LAYERS, EXPERTS = 3, 16  # of the quickstart's model


def run_of(path: Path, steps: int = 6, drift: float = 0.0) -> tuple[RunFolder, list[np.ndarray]]:
    """A run of the quickstart that has recorded ``steps``; popularity moves on by ``drift``."""
    rng = np.random.default_rng(0)
    popularity = rng.normal(0, 0.7, (LAYERS, EXPERTS))
    folder = RunFolder.create(path, dump_toml(Recipe.load("quickstart", "trainer.steps=100")))
    kept = []
    for step in range(1, steps + 1):
        popularity = popularity + drift * rng.normal(0, 0.7, popularity.shape)
        noisy = popularity + rng.gumbel(size=(2000, *popularity.shape))
        kept.append(np.argsort(-noisy, axis=-1)[..., :2].astype(np.int8))
        folder.trajectories.append({"step": step, "turns": [{"experts": routes_to_json(kept[-1])}]})
    return folder, kept


def loads_of(routes: list[np.ndarray]) -> np.ndarray:
    return np.sum([expert_loads(one, EXPERTS) for one in routes], axis=0)


def straggler(path: Path, routes: list[np.ndarray]) -> float:
    placement = read_placement(path, 4)
    assert placement is not None
    return measure_imbalance(loads_of(routes), owner_of(placement), 4).straggler


def test_a_placement_and_what_it_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, routes = run_of(tmp_path / "run")
    out = tmp_path / "placement.json"
    place_experts(folder.path, 4, out)
    stated = capsys.readouterr().out
    assert "neighbours" in stated and "placed" in stated and f"parallel.placement={out}" in stated
    neighbours = measure_imbalance(loads_of(routes), place_contiguously(LAYERS, EXPERTS, 4), 4).straggler
    assert straggler(out, routes) < 1.05 < neighbours


def test_a_placement_in_use_is_judged_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = run_of(tmp_path / "first")
    later, routes = run_of(tmp_path / "later", drift=0.5)
    here, there = tmp_path / "here", tmp_path / "there"
    place_experts(first.path, 4, here)
    place_experts(later.path, 4, there, current=here)
    assert straggler(there, routes) < straggler(here, routes)
    assert "current" in capsys.readouterr().out


def test_what_is_no_placement_is_refused(tmp_path: Path) -> None:
    folder, _ = run_of(tmp_path / "run")
    out = tmp_path / "placement.json"
    place_experts(folder.path, 4, out)
    with pytest.raises(ValueError, match=r"for 4 expert ranks, and the layout has 2; .*--ranks 2"):
        read_placement(out, 2)
    out.write_text("[]")
    with pytest.raises(ValueError, match="no placement"):
        read_placement(out, 4)
    short, _ = run_of(tmp_path / "short", steps=1)
    with pytest.raises(ValueError, match="two at least"):
        place_experts(short.path, 4, out)
    with pytest.raises(ValueError, match="divisor"):
        place_experts(folder.path, 3, out)
