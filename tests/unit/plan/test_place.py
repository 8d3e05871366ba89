"""``ostinato place``: from recorded routes to a file that ``parallel.placement`` takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ostinato.config import Recipe, dump_toml
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import expert_loads, imbalance
from ostinato.parallel.placement import contiguous, owner_of
from ostinato.parallel.placement_file import read_placement
from ostinato.plan.place import Asked, command
from ostinato.routes import routes_to_json
from ostinato.run import RunFolder

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
    placement = read_placement(str(path), Layout.parse("d4e4"))
    assert placement is not None
    return imbalance(loads_of(routes), owner_of(placement), 4).straggler


def test_a_placement_from_a_run_and_what_it_is_worth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, routes = run_of(tmp_path / "run")
    out = tmp_path / "placement.json"
    command(Asked(run=folder.path, ranks=4, out=out))
    said = capsys.readouterr().out
    assert "neighbours" in said and "placed" in said and f"parallel.placement={out}" in said
    neighbours = imbalance(loads_of(routes), contiguous(LAYERS, EXPERTS, 4), 4).straggler
    assert straggler(out, routes) < 1.05 < neighbours


def test_a_placement_in_use_is_judged_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = run_of(tmp_path / "first")
    later, routes = run_of(tmp_path / "later", drift=0.5)
    here, there = tmp_path / "here", tmp_path / "there"
    command(Asked(run=first.path, ranks=4, out=here))
    command(Asked(run=later.path, ranks=4, out=there, current=here))
    assert straggler(there, routes) < straggler(here, routes)
    assert "current" in capsys.readouterr().out


def test_what_is_no_placement_is_refused(tmp_path: Path) -> None:
    folder, _ = run_of(tmp_path / "run")
    out = tmp_path / "placement.json"
    command(Asked(run=folder.path, ranks=4, out=out))
    assert read_placement("", Layout.parse("d4e4")) is None
    with pytest.raises(ValueError, match=r"for 4 expert ranks, and the layout has 2; .*--ranks 2"):
        read_placement(str(out), Layout.parse("d2e2"))
    out.write_text("[]")
    with pytest.raises(ValueError, match="no placement"):
        read_placement(str(out), Layout.parse("d4e4"))
    short, _ = run_of(tmp_path / "short", steps=1)
    with pytest.raises(ValueError, match="two at least"):
        command(Asked(run=short.path, ranks=4, out=out))
    with pytest.raises(ValueError, match="divisor"):
        command(Asked(run=folder.path, ranks=3, out=out))
