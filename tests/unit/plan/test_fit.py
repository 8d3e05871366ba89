"""``ostinato plan fit``: runs that took what known factors say teach those factors, in sum."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import arrangement, problem
from typer.testing import CliRunner

from ostinato.cli.app import app
from ostinato.plan.calibrate import Calibration, kept, kept_file
from ostinato.plan.fit import Fit, Lesson, fit, lesson
from ostinato.plan.problem import Arrangement, Times
from ostinato.plan.record import FILE, record
from ostinato.plan.time import BYTES, CALLS, Efficiency, Roofline
from ostinato.run import RunFolder

ONE = problem()
LAYOUTS = (("d8t2", "d16"), ("d4t4", "d8t2"), ("d2t2p4", "d16"), ("d16e8", "d8t2"), ("d16f8", "d4t4"))
PHASES = ("train", "logprobs", "rollout", "refit")
ERRORS: dict[str, Any] = {"median": 0.1, "worst": 0.2, "observations": 7}


def chosen(number: int) -> Arrangement:
    train, rollout = LAYOUTS[number]
    return arrangement(train, rollout)


@lru_cache
def times(number: int) -> Times:
    return Roofline().step(ONE, chosen(number))


def planned(number: int, made: Calibration | None = None) -> dict[str, Any]:
    """plan.json of a run under one of the layouts."""
    said = times(number) if made is None else Roofline.measured(made).step(ONE, chosen(number))
    return record(ONE, chosen(number), said, {}, {}, calibration=made)


def measured(terms: Mapping[str, Mapping[str, float]], true: Mapping[str, float]) -> list[dict[str, float]]:
    """Rows of three steps that take what ``true`` factors make of ``terms``; the first one warms up."""
    took = {
        phase: sum(s * true.get(f"{phase}/{term}", 1.0) for term, s in terms[phase].items())
        for phase in PHASES
    }
    train = took["train"] + took["logprobs"] + took["refit"]
    return [
        {"step": step, "time/rollout_s": slow * took["rollout"], "time/train_s": slow * train}
        for step, slow in ((1, 9.0), (2, 1.0), (3, 1.0))
    ]


def taught(number: int, true: Mapping[str, float], made: Calibration | None = None) -> Lesson:
    rows = measured(times(number).terms, true)
    return lesson(f"run {number}", planned(number, made), rows, LAYOUTS[number][0])


def names() -> list[str]:
    found = {
        f"{phase}/{term}"
        for number in range(len(LAYOUTS))
        for phase in PHASES
        for term in times(number).terms[phase]
    }
    return sorted(found)


@st.composite
def factors(draw: st.DrawFn) -> dict[str, float]:
    """Every phase has a scale, and its terms are around it."""
    scale = {phase: draw(st.floats(0.3, 3.0)) for phase in PHASES}
    scale["refit"] = scale["logprobs"] = scale["train"]
    return {name: scale[name.partition("/")[0]] * draw(st.floats(0.7, 1.4)) for name in names()}


some_runs = st.lists(st.sampled_from(range(len(LAYOUTS))), min_size=1, unique=True)


def off(found: Fit) -> list[float]:
    return [abs(part.fitted / part.measured - 1) for part in found.parts]


@given(factors(), some_runs)
def test_known_factors_come_back_in_sum(true: dict[str, float], numbers: list[int]) -> None:
    runs = [taught(number, true) for number in numbers]
    found = fit(runs, None)
    assert max(off(found)) < 0.06
    assert found.calibration.worst == pytest.approx(max(off(found)))
    assert found.calibration.observations == 2 * len(numbers)
    assert [part.planned for part in found.parts] == [part.predicted for run in runs for part in run.parts]


@given(factors(), st.sampled_from(range(len(LAYOUTS))))
def test_of_one_run_each_part_is_met_and_nothing_is_left_to_learn(
    true: dict[str, float], number: int
) -> None:
    first = fit([taught(number, true)], None)
    assert max(off(first)) < 1e-6
    for made in (
        None,
        first.calibration,
    ):  # as it was planned before, and as it is planned with what it taught
        second = fit([taught(number, true, made)], first.calibration)
        assert second.calibration.factors == pytest.approx(first.calibration.factors)


@given(factors(), some_runs)
def test_fitting_again_moves_nothing_further_than_what_was_left(
    true: dict[str, float], numbers: list[int]
) -> None:
    first = fit([taught(number, true) for number in numbers], None)
    second = fit([taught(number, true, first.calibration) for number in numbers], first.calibration)
    left, after = (sum(one**2 for one in off(found)) for found in (first, second))
    assert after <= left * (1 + 1e-6) + 1e-12
    assert [part.planned for part in second.parts] == pytest.approx([part.fitted for part in first.parts])
    unmoved = fit([taught(number, true) for number in numbers], first.calibration)
    assert unmoved.calibration.factors == pytest.approx(second.calibration.factors)


@pytest.mark.parametrize(
    "kept_now",
    [
        Calibration(factors={CALLS: 2.0}, **ERRORS),
        Calibration(factors={BYTES: 2.0}, **ERRORS),
        Calibration(factors={}, efficiency={"latency": 1e-3}, **ERRORS),
    ],
)
def test_other_efficiencies_than_those_of_the_plan_are_refused(kept_now: Calibration) -> None:
    one = taught(0, {})
    with pytest.raises(ValueError, match=r"run 0 was planned with other efficiencies .* --record run 0"):
        fit([one], kept_now)
    same = Calibration(factors={}, efficiency={"latency": Efficiency().latency}, **ERRORS)
    assert fit([one], same).calibration.efficiency == same.efficiency


def test_a_run_that_teaches_nothing_is_refused_by_name() -> None:
    plan, rows = planned(0), measured(times(0).terms, {})
    layout = LAYOUTS[0][0]
    old = {name: value for name, value in plan.items() if name != "device"}
    sampled = [row | {"tokens/sampled": 2 * plan["tokens"]} for row in rows]
    wrong: list[tuple[Any, Any, str, str]] = [
        (old, rows, layout, "does not name its kind of device; plan it anew with --record a"),
        ([], rows, layout, "does not name its kind of device"),
        (plan | {"calibration": {"factors": 3}}, rows, layout, "of a cannot be read"),
        (plan, rows[:1], layout, "a has no seconds of a step behind its first"),
        (plan | {"step": 2}, rows, layout, "no seconds of a step behind its first"),
        (plan, rows, "d2", "a trains under layout d2 and its plan is of d8t2"),
        (plan, rows, "", "a trains under layout 1 and"),
        (plan, sampled, layout, "samples .* tokens a step and its plan is of .*--answer-tokens"),
    ]
    for said, seen, under, words in wrong:
        with pytest.raises(ValueError, match=words):
            lesson("a", said, seen, under)


def test_of_overlap_only_the_trainer_and_what_it_publishes_teach() -> None:
    """time/rollout_s is what the trainer waited then; on the same devices it is slowed down itself."""
    plan, layout = planned(0), LAYOUTS[0][0]
    rows = [row | {"time/publish_s": 0.5} for row in measured(times(0).terms, {})]
    found = lesson("a", plan | {"placement": "apart"}, rows, layout)
    assert [part.name for part in found.parts] == ["a train", "a refit"]
    assert not any(term.startswith("refit") for term in found.parts[0].terms)
    assert "rollouts of a teach nothing" in found.note
    with pytest.raises(ValueError, match=r"a samples while it trains.* without pipeline\.overlap"):
        lesson("a", plan, rows, layout)


# ---- the command

ASKED = ["plan", "qwen3-8b", "--gpus", "4xH100-80", "--prompts", "32", "--max-answer", "4096"]
ASKED += ["--answer-tokens", "512", "--train-layout", "d4"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def told(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    return done.output


def slow_run(folder: Path, times: float) -> RunFolder:
    """A run that was planned, and takes so many times longer."""
    run = RunFolder.create(folder, 'name = "planned"\n\n[parallel]\nlayout = "d4"\n')
    told(*ASKED, "--record", str(folder))
    plan = json.loads((folder / FILE).read_bytes())
    true = {f"{phase}/{term}": times for phase, terms in plan["seconds"].items() for term in terms}
    for row in measured(plan["seconds"], true):
        run.write(int(row.pop("step")), row)
    return run


def seconds_of_a_step() -> tuple[str, float]:
    found = json.loads(told(*ASKED, "--json", "-"))
    return found["efficiency"], found["plans"][0]["seconds_total"]


def test_runs_teach_later_plans(tmp_path: Path) -> None:
    run, file = slow_run(tmp_path / "run", 2.0), kept_file("H100-80")
    before = seconds_of_a_step()
    assert "nothing measured" in before[0]
    dry = told("plan", "fit", str(run.path), "--dry")
    assert "nothing was kept (--dry)" in dry and not file.exists()
    said = told("plan", "fit", str(run.path))
    for part in ("rollout", "train"):
        assert re.search(rf"run {part} .* 2\.00 .* 1\.00", said)
    assert f"kept in {file}: factors of" in said and "from 2 measured steps, median error 0%" in said
    after = seconds_of_a_step()
    assert after[0] == "from 2 measured steps, median error 0%"
    assert after[1] == pytest.approx(2 * before[1], rel=0.05)


def test_a_second_fit_starts_from_the_first(tmp_path: Path) -> None:
    run, file = slow_run(tmp_path / "run", 2.0), kept_file("H100-80")
    told("plan", "fit", str(run.path))
    first = kept(file)
    told("plan", "fit", str(run.path))
    other = slow_run(tmp_path / "other", 1.0)  # its plan has the factors, and they are right
    assert json.loads((other.path / FILE).read_bytes())["calibration"]["observations"] == 4
    assert "from 6 measured steps" in told("plan", "fit", str(other.path))
    last = kept(file)
    assert first is not None and last is not None
    assert last.factors == pytest.approx(first.factors)


def test_folders_that_teach_nothing_are_refused_in_a_sentence(tmp_path: Path) -> None:
    def refused(words: str, *runs: Path) -> None:
        with pytest.raises(ValueError, match=words):
            told("plan", "fit", *map(str, runs))

    run = RunFolder.create(tmp_path / "run", 'name = "x"\n')
    refused(r"plan\.json does not exist; plan the run first, with --record", run.path)
    (run.path / FILE).write_text("{")
    refused(r"plan\.json is no JSON; plan the run anew", run.path)
    refused("is named twice", run.path, run.path)
    refused("holds no recipe.toml", tmp_path)
