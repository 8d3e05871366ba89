"""``ostinato bench experts``: from a run's trajectories to factors, without the run and without a clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab import experts as bench
from ostinato.routes import routes_to_json
from ostinato.run import RunFolder
from ostinato.types import NO_EXPERT

PLAN = replace(bench.Plan(), ranks=(2, 4), drawn_ranks=(4,), draws=10, experts=16, top_k=2, tokens=2000)


def steps_of(seed: int, steps: int = 6, tokens: int = 400, experts: int = 8) -> list[np.ndarray]:
    """[T, 2, 2] of each step: experts of unequal popularity, another in each layer."""
    rng = np.random.default_rng(seed)
    popularity = np.random.default_rng(0).lognormal(0, 0.7, (2, experts))
    noisy = np.log(popularity) + rng.gumbel(size=(steps, tokens, 2, experts))
    return list(np.argsort(-noisy, axis=-1)[..., :2].astype(np.int8))


def folder_of(path: Path, steps: list[np.ndarray]) -> RunFolder:
    folder = RunFolder.create(path, "")
    for number, routes in enumerate(steps):
        last = np.full((1, *routes.shape[1:]), NO_EXPERT, routes.dtype)  # of the last token sampled
        turns = [
            {"experts": routes_to_json(np.concatenate([part, last]))} for part in np.array_split(routes, 3)
        ]
        rows = [{"step": number, "turns": [turn, {"experts": None}]} for turn in turns]
        folder.trajectories.append(*rows)
    return folder


def test_routes_of_a_run_by_step(tmp_path: Path) -> None:
    steps = steps_of(1)
    found, experts = bench.recorded(folder_of(tmp_path / "run", steps))
    assert experts == 8 and len(found) == len(steps)
    assert (bench.windows_of(found, 8) == bench.windows_of(steps, 8)).all()


def test_a_run_without_routes_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    folder.trajectories.append({"step": 1, "turns": [{"experts": None}]})
    with pytest.raises(ValueError, match=r"log\.trajectories_every=1"):
        bench.recorded(folder)


def test_placed_experts_are_more_even_than_as_they_come() -> None:
    rows = {row["placement"]: row for row in bench.of_recorded(steps_of(2, steps=20), 8, 4)}
    assert list(rows) == list(bench.ARRANGED)
    assert 1 <= rows["hindsight"]["windowless"] <= rows["placed"]["windowless"]
    assert rows["placed"]["straggler"] < rows["contiguous"]["straggler"]
    for row in rows.values():
        assert (
            row["bound"] <= row["windowless"] + 1e-9 <= row["straggler"] + 2e-9
        )  # steps have luck of their own
        assert 1 < row["ranks_per_token"] <= 2


def test_drawn_popularity() -> None:
    rows = {row["placement"]: row for row in bench.of_drawn(PLAN, 4)}
    assert rows["placed"]["straggler"] < rows["contiguous"]["straggler"]
    assert rows["placed"]["low"] <= rows["placed"]["straggler"] <= rows["placed"]["high"]


def test_drawn_routes_name_an_expert_once() -> None:
    routes = bench._drawn_routes(PLAN, 100, 1)
    assert routes.shape == (100, 1, 2) and (routes[..., 0] != routes[..., 1]).all()
