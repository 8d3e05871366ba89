"""The page itself: report.html.jinja filled with facts, charts and samples, style and scripts inside.

Nothing that a model, a dataset or a user wrote becomes markup: the template escapes (jinja2 autoescape), data
for the scripts is JSON without ``<``, the scripts set text and never HTML, and the page's own
Content-Security-Policy allows only its own scripts, by digest, and no network connection.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ostinato.observe.report.charts import downstream_sections, held_out, sections, to_plain
from ostinato.observe.report.concerns import concerns
from ostinato.observe.report.drafts import draft_sections
from ostinato.observe.report.facts import (
    comparisons,
    faults,
    header,
    headline,
    marked_steps,
    milestones,
    status,
    totals,
    waste,
)
from ostinato.observe.report.forecast import forecast_sections
from ostinato.observe.report.gantt import steps_of, whole
from ostinato.observe.report.mismatch import mismatch_section
from ostinato.observe.report.page.offline import render, script_json
from ostinato.observe.report.pictures import Pictures
from ostinato.observe.report.plan import plan_sections
from ostinato.observe.report.reading import RunData
from ostinato.observe.report.samples import Samples
from ostinato.observe.report.timeline import ANCHOR, pipeline_sections
from ostinato.observe.report.verdicts import failed_rewards


def html(data: RunData, samples: Samples, pictures: Pictures, now: datetime | None = None) -> str:
    """The whole page. ``now`` is the time of writing."""
    now = now or datetime.now(UTC)
    score = held_out(data)
    ahead = [*downstream_sections(data), *forecast_sections(data)]
    parts = [*sections(data), *pipeline_sections(data), mismatch_section(data), *draft_sections(data)]
    groups = [*ahead, *parts, *plan_sections(data)]
    drawn = [score, *(chart for group in groups for chart in group.charts)]
    state, tone = status(data, now)
    return render(
        "report.html.jinja",
        ("uplot.js", "charts.js", "gantt.js", "samples.js"),
        data=data,
        state=state,
        tone=tone,
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        header=header(data),
        headline=headline(data),
        comparisons=comparisons(data),
        concerns=concerns(data),
        totals=[*milestones(data), *totals(data)],
        held_out=score,
        sections=groups,
        waste=waste(data),
        faults=faults(data),
        failed=failed_rewards(data.failed),
        samples=samples,
        pictures=pictures,
        chart_data=script_json({chart.key: to_plain(chart) for chart in drawn if not chart.empty}),
        gantt_in=ANCHOR if data.spans else "",
        gantt_data=script_json(whole(data.spans, steps_of(data.ledger))),
        marks=json.dumps(marked_steps(data)),
        sample_data=script_json(_sample_index(data, samples)),
    )


def _sample_index(data: RunData, samples: Samples) -> dict[str, Any]:
    groups = [{**asdict(chunk), "data": None} for chunk in samples.chunks]
    return {"groups": groups, "solved_at": solved_at(data)}


def solved_at(data: RunData) -> float:
    """The reward from which an answer counts as solved; by default the sum of all positive weights, which is
    full marks."""
    limit = data.setting("reward.solved_at", "full")
    if isinstance(limit, int | float):
        return limit - 1e-6
    functions = data.setting("reward.functions", ("",))
    weights = data.setting("reward.weights") or [1.0] * len(functions)
    chosen = next(iter(data.setting("task.mix", ())), {}).get("rewards") or functions  # same for all tasks
    pairs = zip(functions, weights, strict=False)
    return sum(weight for name, weight in pairs if name in chosen and weight > 0) - 1e-6
