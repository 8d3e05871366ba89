"""``ostinato bench experts``: from a run folder to a table and a page, two ranks timed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lab import experts as bench
from lab.experts_page import MARK, write_page
from ostinato.routes import routes_to_json
from ostinato.run import RunFolder

pytestmark = pytest.mark.lab


def test_from_a_run_to_a_page(tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(0), RunFolder.create(tmp_path / "run", "")
    for step in range(4):
        routes = np.argsort(rng.random((40, 2, 8)), axis=-1)[..., :2].astype(np.int8)
        folder.trajectories.append({"step": step, "turns": [{"experts": routes_to_json(routes)}]})
    plan = bench.Plan(
        run=str(folder.path),
        ranks=(2,),
        drawn_ranks=(4,),
        draws=3,
        experts=16,
        top_k=2,
        tokens=2000,
        sizes=((16, 8),),
        rows=20,
        rounds=2,
        limit_s=200.0,
    )
    result = bench.run(plan, lambda line: None)
    assert [row["name"] for row in result["timed"]] == ["recorded", "drawn"]
    for row in result["timed"]:
        assert row["time"]["rounds"] == 2 and row["time"]["base_s"] > 0
        assert len(row["exchange_s"]) == 2 and min(row["exchange_s"]) > 0
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(bench.table(result))
    text = console.export_text()
    assert "hindsight" in text and "16 x 8" in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARK}\nold\n{MARK}\nafter\n")
    write_page(result, page)
    once = page.read_text()
    assert once.startswith("before\n") and once.endswith("\nafter\n") and "old" not in once
    assert "| 2 | hindsight |" in once and "drawn, 16 x 8" in once
    write_page(result, page)
    assert page.read_text() == once
    page.write_text("no marks")
    with pytest.raises(ValueError, match="0 times"):
        write_page(result, page)
