"""A plan on disk, and what a report and a calibration make of it beside the metrics of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from plan_world import arrangement, problem

from ostinato.observe.report import plan as shown
from ostinato.observe.report.plan import plan_sections
from ostinato.observe.report.reading import read_run
from ostinato.plan.fit import IN_TURNS, OVERLAPPED
from ostinato.plan.memory import memory
from ostinato.plan.problem import Phase
from ostinato.plan.record import FILE, record, write
from ostinato.plan.search import Plan
from ostinato.plan.time import Roofline
from ostinato.plan.traffic import step_traffic, traffic
from ostinato.run import RunFolder

ONE, CHOSEN = problem(), arrangement("d8t2", "d16")


def planned(**more: Any) -> dict[str, Any]:
    found = {phase: memory(ONE, CHOSEN, phase) for phase in Phase}
    plan = Plan(arrangement=CHOSEN, memory=found, times=Roofline().step(ONE, CHOSEN))
    return record(ONE, plan, asked={}, factors={}) | more


def folder(path: Path, plan: dict[str, Any], steps: int = 4) -> RunFolder:
    """A run of the plan that takes twice as long to train as it was planned to."""
    run = RunFolder.create(path, 'name = "planned"\n')
    write(path / FILE, plan)
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


def test_what_was_weighed_is_shown_with_a_plan_or_without(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", planned())
    run.replan.append({"step": 4, "switch": True, "reason": "shorter answers", "answers": []})
    data = read_run(run)
    for one in (data, replace(data, plan={})):
        (section,) = plan_sections(one)
        assert section.tables[-1].rows == [("step 4", "on under another", "shorter answers")]


def test_a_run_without_a_plan_or_with_a_damaged_one_is_reported(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", planned())
    assert plan_sections(replace(read_run(run), plan={})) == []
    (run.path / FILE).write_text("{")
    data = read_run(run)
    assert plan_sections(data) == [] and "plan.json cannot be read" in data.damage[-1]
    odd = {"seconds": {"train": 3, "rollout": {"decode": "x"}}, "traffic": {"a/b": None}, "layouts": 1}
    assert plan_sections(replace(data, plan=odd))[0].lead == ""


def test_what_is_planned_to_be_sent_has_old_logprobs_in_it() -> None:
    """They are counted in a step's metrics, too; of a single optimizer step there are none."""
    train = traffic(ONE, Phase.TRAIN, CHOSEN.train)
    assert step_traffic(ONE, CHOSEN) == train
    twice = replace(ONE, work=replace(ONE.work, updates=2))
    both, scored = step_traffic(twice, CHOSEN), traffic(twice, Phase.LOGPROBS, CHOSEN.logprobs)
    for key, sent in traffic(twice, Phase.TRAIN, CHOSEN.train).items():
        more = scored.get(key)
        assert both[key].bytes == sent.bytes + (more.bytes if more else 0)
        assert both[key].calls == sent.calls + (more.calls if more else 0)
    assert scored.keys() <= both.keys()
