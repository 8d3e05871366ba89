"""The section on drafts: there when a run drafted, absent otherwise, and its sums are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nouns import run_data

from ostinato.config import Recipe, dump_toml
from ostinato.observe.report import write_report
from ostinato.observe.report.charts import Chart
from ostinato.observe.report.concerns import concerns
from ostinato.observe.report.drafts import draft_sections, lead
from ostinato.observe.report.reading import RunData
from ostinato.run import RunFolder


def row(step: int, **changes: float) -> dict[str, Any]:
    drafts = {
        "draft/tokens_per_pass": 2.0,
        "draft/acceptance": 0.9,
        "draft/cpu_share": 0.02,
        "draft/share_history": 0.3,
        "draft/share_sibling": 0.2,
        "draft/seconds_saved": 0.5,
        "tokens/sampled": 100.0,
        "tokens/accepted": 50.0,
        "time/rollout_s": 1.0,
    }
    return {"step": step, **drafts, **{f"draft/{name}": value for name, value in changes.items()}}


def data(rows: list[dict[str, Any]]) -> RunData:
    return run_data(recipe={"trainer": {"steps": len(rows)}}, metrics=rows)


def charts(run: RunData) -> dict[str, Chart]:
    (section,) = draft_sections(run)
    return {chart.key: chart for chart in section.charts}


def test_a_run_without_drafts_has_no_section() -> None:
    assert draft_sections(data([{"step": 1, "reward": 0.5}])) == []


def test_shares_of_the_output_add_up_to_all_of_it() -> None:
    (chart,) = [
        c for key, c in charts(data([row(1), row(2, share_other=0.4)])).items() if key == "output-by-source"
    ]
    assert [one.label for one in chart.series] == ["past answers", "siblings", "other prompts", "not guessed"]
    totals = [
        sum(one.values[1] or 0.0 for one in chart.series),
        sum(one.values[0] or 0.0 for one in chart.series),
    ]
    assert totals == pytest.approx([1.0, 1.0])


def test_the_lead_says_what_it_comes_to() -> None:
    sentence = lead([row(1), row(2, tokens_per_pass=3.0)])
    assert "3.00 tokens" in sentence and "50% of all tokens" in sentence
    assert "saved 1.0 s of rollouts, which took 2.0 s" in sentence
    assert "cost 2.0 s of rollouts" in lead([row(1, seconds_saved=-2.0)])


def test_drafts_that_cost_more_than_they_save_are_a_concern() -> None:
    def output(saved: float) -> list[str]:
        return [one.text for one in concerns(data([row(1, seconds_saved=saved)])) if "drafts" in one.text]

    assert output(0.5) == output(-0.02) == []
    (text,) = output(-0.2)
    assert "20% longer" in text and "draft.enabled" in text


def test_it_reaches_the_page(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe()))
    run.write(1, row(1))
    page = write_report(run).read_text(encoding="utf-8")
    assert "Drafts from history" in page and 'data-chart="output-by-source"' in page
