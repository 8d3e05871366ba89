"""The page of ``ostinato scale`` in a browser: no script error, and a fit window that needs no colour."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from browsers import dump_dom

from ostinato.observe.report.charts import Section
from ostinato.observe.report.scaling import Course, Page, curve_chart, places, write_page

pytestmark = pytest.mark.lab


def course(name: str) -> Course:
    """Twelve evaluations: two before the fit window, seven in it, three after it."""
    compute = np.geomspace(1000, 50_000, 12)
    at = places([compute], 100_000)
    return Course(
        name=name,
        compute=compute,
        score=np.linspace(0.4, 0.6, 12),
        window=(float(compute[2]), float(compute[8])),
        places=at,
        quantiles=np.linspace(0.4, 0.6, len(at)) + np.linspace(-0.02, 0.02, 5)[:, None],
        told=True,
    )


@pytest.mark.parametrize("runs", [1, 2])
def test_the_window_and_the_parts_of_a_run_have_shapes(runs: int, tmp_path: Path) -> None:
    charts = [curve_chart([course(f"run {at}") for at in range(runs)], "GPU-hours", "")]
    page = tmp_path / "page.html"
    write_page(page, Page(title="runs", kind="fit", sections=[Section(title="Curve", charts=charts)]))
    dom = dump_dom(page.as_uri(), tmp_path)
    assert 'data-charts="1"' in dom and "data-error" not in dom[: dom.index("<body")]
    assert all(dom.count(f'class="u-series {marker}"') == runs for marker in ("cross", "dot", "ring"))
    (chart,) = json.loads(re.findall(r'id="chart-data">(.*?)</script>', dom, re.DOTALL)[0]).values()
    assert [one["dashed"] for one in chart["series"]].count(True) == runs - 1  # the curve of the second
    assert bool(chart["edges"]) == (runs == 1)
