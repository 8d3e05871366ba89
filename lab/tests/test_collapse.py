"""A collapse study in small: runs end as lines, a stopped study goes on, the page comes from the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import collapse_page as page
import pytest
from collapse import Job, Setting, World, run, study

from ostinato.model.native.build import BuildError, load_library

pytestmark = pytest.mark.lab

SMALL = Setting(
    steps=2, prompts=2, group=4, max_tokens=24, minibatches=2, held_out=8, train=64, measure_every=1
)


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        load_library()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
def test_a_study_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    wanted = [Job(arm="none", dose="int4", seed=0), Job(arm="R3", dose="int4", seed=0)]
    told: list[str] = []
    study(SMALL, wanted[:1], file, 1, told.append)
    study(SMALL, wanted, file, 1, told.append)
    assert told[0].startswith("1 of 1 runs to do") and told[2].startswith("1 of 2 runs to do")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["none", "R3"]
    assert rows[0]["before"] == rows[1]["before"]
    assert [len(row["steps"]["reward"]) for row in rows] == [2, 2]
    page.write(page.read(file), tmp_path / "docs")
    assert "### Survival" in (tmp_path / "docs" / "page.md").read_text()


@pytest.mark.usefixtures("compiler")
def test_a_run_is_a_function_of_its_seed() -> None:
    """Nothing of what a process did before is in a run: a study may be cut and dealt to workers anyhow."""
    job = Job(arm="R3+TIS", dose="noise:1", seed=1)
    world = World.load(SMALL)
    first, again = run(world, job), run(replace(world, samplers={}, starts={}), job)
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert {**run(world, replace(job, seed=2)), "seconds": 0}["steps"] != first["steps"]
