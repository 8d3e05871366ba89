"""The page itself: report.html.jinja filled with facts, charts and samples, style and scripts inside.

Nothing that a model, a dataset or a user wrote becomes markup: the template escapes (jinja2 autoescape), data
for the scripts is JSON without ``<``, the scripts set text and never HTML, and the page's own
Content-Security-Policy admits no script but these two, by digest, and no connection to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ostinato.report.charts import held_out, sections, to_plain
from ostinato.report.concerns import concerns
from ostinato.report.drafts import draft_sections
from ostinato.report.facts import (
    comparisons,
    faults,
    header,
    headline,
    marked_steps,
    milestones,
    protocol,
    status,
    totals,
    waste,
)
from ostinato.report.mismatch import mismatch_section
from ostinato.report.reading import RunData
from ostinato.report.samples import Samples

FOLDER = Path(__file__).parent
SCRIPTS = ("charts.js", "samples.js")


def html(data: RunData, samples: Samples, now: datetime | None = None) -> str:
    """The whole page. ``now`` is the time that it says it was written at."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    now = now or datetime.now(UTC)
    scripts = [(FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS]
    score, groups = held_out(data), [*sections(data), mismatch_section(data), *draft_sections(data)]
    drawn = [score, *(chart for group in groups for chart in group.charts)]
    state, tone = status(data, now)
    return environment.get_template("report.html.jinja").render(
        data=data,
        style=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        digests=" ".join(f"'{_digest(script)}'" for script in scripts),
        state=state,
        tone=tone,
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        header=header(data),
        headline=headline(data),
        comparisons=comparisons(data),
        protocol=protocol(data),
        concerns=concerns(data),
        totals=[*milestones(data), *totals(data)],
        held_out=score,
        sections=groups,
        waste=waste(data),
        faults=faults(data),
        samples=samples,
        chart_data=Markup(_json({chart.key: to_plain(chart) for chart in drawn if not chart.empty})),
        marks=json.dumps(marked_steps(data)),
        sample_data=Markup(_json(_sample_index(data, samples))),
    )


def _sample_index(data: RunData, samples: Samples) -> dict[str, Any]:
    groups = [{**asdict(chunk), "data": None} for chunk in samples.chunks]
    return {"groups": groups, "solved_at": solved_at(data)}


def solved_at(data: RunData) -> float:
    """The reward from which an answer counts as solved, by default full marks of every function of positive
    weight."""
    asked = data.setting("reward.solved_at", "full")
    if isinstance(asked, int | float):
        return asked - 1e-6
    functions = data.setting("reward.functions", ("",))
    weights = data.setting("reward.weights") or [1.0] * len(functions)
    return sum(weight for weight in weights if weight > 0) - 1e-6


def _json(value: Any) -> str:
    """JSON that can stand in a script element: no "<" can end it or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _digest(script: str) -> str:
    """As a Content-Security-Policy names an inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
