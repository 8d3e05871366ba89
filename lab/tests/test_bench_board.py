"""``ostinato bench board``: the page that asks, and what runs with it and without come to."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lab.board import Page, Plan, follow, summary, table
from ostinato.config import Recipe, dump_toml
from ostinato.observe.board import open_server
from ostinato.run import RunFolder


def test_the_page_asks_what_the_browser_asks(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse({"name": "quickstart"})))
    with open_server(run, "127.0.0.1") as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with closing(Page("127.0.0.1", server.server_port)) as page:
            for second in range(3):
                page.look(float(second))
        server.shutdown()
    assert page.looks == 3 and min(page._seen.values()) >= 0


def test_a_run_that_never_came_is_not_waited_for(tmp_path: Path) -> None:
    ended = threading.Event()
    threading.Timer(0.02, ended.set).start()
    assert follow(tmp_path / "nowhere", ended) == 0


def once(*step_s: float, cpu_s: float, work: float = 0.5) -> dict[str, Any]:
    return {
        "step_s": list(step_s),
        "work": [[work, 9.0]] * len(step_s),
        "cpu_s": cpu_s,
        "board_cpu_s": 0.4,
        "looks": 12,
    }


def test_steps_are_compared_one_by_one_and_said_not_to_be_pairs_where_they_are_not() -> None:
    """A round that is slow for both does not touch the ratio."""
    alone, slow = once(1.0, 2.0, 4.0, cpu_s=10.0), once(3.0, 6.0, 12.0, cpu_s=30.0)
    rounds = [
        {False: alone, True: once(1.01, 2.02, 4.04, cpu_s=10.1)},
        {True: once(3.03, 6.06, 12.12, cpu_s=30.3), False: slow},
    ]
    found = summary(Plan(rounds=2, steps=6), rounds)
    assert found["step"]["ratio"] == found["cpu"]["ratio"] == 1.01
    assert found["step"]["rounds"] == 6 and found["cpu"]["rounds"] == 2 and found["same_work"]
    assert "a step: followed / alone 1.0100" in table(found) and "not pairs" not in table(found)
    other = summary(Plan(), [{False: alone, True: once(1.0, 2.0, 4.0, cpu_s=1.0, work=0.4)}])
    assert not other["same_work"] and "not pairs" in table(other)


def test_a_plan_without_steps_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="leave nothing to compare"):
        Plan(steps=3)
    Recipe.load("quickstart", *Plan().overrides())
