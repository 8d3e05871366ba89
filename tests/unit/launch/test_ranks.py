"""The section [parallel]: what is refused, with which sentence, and before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.config import Recipe
from ostinato.launch import trainer as parts
from ostinato.launch.checks import check
from ostinato.launch.ranks import backend, followed
from ostinato.launch.trainer import new_sharded_trainer

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"parallel": {"layout": "d2"}, "cluster": {"samplers": 1, "remote_trainer": True}},
            "parallel.layout is 'd2' with cluster.remote_trainer true, but the ranks of a sharded trainer "
            "are started beside the loop; set cluster.remote_trainer to false",
        ),
        (
            {"parallel": {"layout": "d2", "timeout_s": 600.0}},
            "pipeline.watch_s is 600, but a collective may take 600 s (parallel.timeout_s), so a hung rank "
            "would end the run before it is named; raise watch_s or lower timeout_s",
        ),
        (
            {"parallel": {"silence_s": 60.0, "timeout_s": 30.0}},
            "parallel.silence_s is 60 with parallel.timeout_s 30, but a rank that is lost has to be known "
            "before a collective gives up; lower silence_s",
        ),
        ({"parallel": {"backend": "mpi"}}, "parallel.backend is 'mpi'; use one of 'auto', 'gloo', 'nccl'"),
        ({"parallel": {"timeout_s": 0.0}}, "parallel.timeout_s is 0.0; use a number above 0.0"),
        (
            {"parallel": {"layuot": "d2"}},
            "parallel.layuot is not a key of a recipe; did you mean parallel.layout?",
        ),
    ],
)
def test_recipes_that_are_refused(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        Recipe.parse(tree)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("layout", ["", "d2t2"])
def test_other_ranks_than_the_layout_has_are_refused(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    recipe = Recipe.parse({"parallel": {"layout": layout}})
    check(recipe)
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    world = 4 if layout else 1
    with pytest.raises(ValueError) as caught:
        check(recipe)
    assert str(caught.value) == (
        f'parallel.layout is "{layout}", of {world} in all, but torchrun has started 2 ranks (WORLD_SIZE); '
        f"start {world}, or choose another layout"
    )


def test_rank_0_is_the_run_and_the_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert followed() is None
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert followed() is None
    monkeypatch.setenv("RANK", "1")
    place = followed()
    assert place is not None and place.rank == 1


def test_the_backend_fits_the_device() -> None:
    def chosen(name: str, device: str) -> str:
        return backend(Recipe.parse({"parallel": {"backend": name}}), device)

    assert chosen("auto", "cpu") == chosen("gloo", "cpu") == "gloo"
    assert chosen("auto", "cuda") == chosen("nccl", "cuda") == "cpu:gloo,cuda:nccl"
    for name, device in (("nccl", "cpu"), ("gloo", "cuda")):
        with pytest.raises(ValueError, match=f'parallel.backend is "{name}" with a model on {device}'):
            chosen(name, device)


def test_a_rank_is_ready_before_groups_are_made_and_not_before_its_part_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    class Enough(Exception):
        """The rest needs the other rank."""

    def loaded(*args: Any, **options: Any) -> Any:
        told.append("loaded")
        return load(*args, **options)

    def grouped(*args: Any, **options: Any) -> Any:
        told.append("groups")
        raise Enough

    load = parts.load_decoder
    monkeypatch.setattr(parts, "load_decoder", loaded)
    monkeypatch.setattr(parts, "Mesh", grouped)
    recipe = Recipe.load("quickstart", "parallel.layout=d2", "model.device=cpu", "model.dtype=float32")
    with pytest.raises(Enough):
        new_sharded_trainer(recipe, 1, ready=lambda: told.append("ready"))
    assert told == ["loaded", "ready", "groups"]
