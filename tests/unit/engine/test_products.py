"""The choice of a dtype: what is measured, what is kept and what is printed, whatever this machine is."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ostinato.config import Recipe, dump_toml
from ostinato.engine import products
from ostinato.engine.products import cache_file, choose_dtype, explain_slow_dtype, find_seconds
from ostinato.files import atomic_write, read_cached
from ostinato.launch.machine import resolve_auto
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.flops import FlopModel, Work
from ostinato.model.named import find_model_folder
from ostinato.run import RunFolder

HOW: dict[str, Any] = {"native": False, "fp32_head": True}


@pytest.fixture
def config() -> ModelConfig:
    return read_config(find_model_folder("asset:seed-moe"))


def keep(config: ModelConfig, text: str) -> None:
    """Put ``text`` where the figures of ``config`` are kept."""
    file = cache_file(products.list_products(config), "torch", fp32_head=True)
    atomic_write(file, text)


def figures(wide: tuple[float, float], narrow: tuple[float, float], *, busy: object = False) -> str:
    """(sampled, trained) of float32 and of bfloat16."""
    named = {"float32": wide, "bfloat16": narrow}
    tree = {name: {"sampled": pair[0], "trained": pair[1]} for name, pair in named.items()}
    return json.dumps({"busy": busy, **tree})


def test_the_products_are_all_of_a_tokens_forward(config: ModelConfig) -> None:
    """Their FLOPs are those of ``model.flops`` but for router, mixing and attention's pairs."""
    rates = FlopModel.of(config, None).forward(Work(tokens=1, logits=1))
    moe = config.moe
    assert moe is not None
    router = 2.0 * len(moe.layers) * config.hidden_size * moe.num_experts
    mixing = 2.0 * len(moe.layers) * config.hidden_size * moe.top_k
    found = (
        2.0 * one.count * math.prod(one.shape[-2:]) * (3 * one.top_k or 1)
        for one in products.list_products(config)
    )
    assert sum(found) == rates - router - mixing


def test_what_is_kept_decides_and_is_told(
    config: ModelConfig, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(config, figures((1e-6, 1e-6), (1.2e-6, 7.1e-6)))
    chosen = choose_dtype(config, device="cpu", **HOW)
    assert chosen.dtype == "float32"
    assert chosen.reason.endswith("bfloat16 would be 7.1x slower in training and 1.2x slower in sampling")
    assert "bfloat16 would be 7.1x" in explain_slow_dtype(config, "bfloat16", **HOW)
    assert explain_slow_dtype(config, "float32", **HOW) == ""
    recipe = Recipe.parse({"model": {"fp32_head": True}, "engine": {"native": False}})
    assert resolve_auto(recipe).model.dtype == "float32"
    assert caplog.messages == [f"model.dtype auto: float32; {chosen.reason}"]
    keep(config, figures((3e-6, 3e-6), (1e-6, 1e-6)))
    assert choose_dtype(config, device="cpu", **HOW).dtype == "bfloat16"
    keep(config, figures((1.05e-6, 1e-6), (1e-6, 1e-6)))
    assert choose_dtype(config, device="cpu", **HOW).dtype == "float32", "a gain of 2 % is no reason to round"


def test_a_dtype_that_is_written_is_obeyed_with_a_line_where_it_is_much_slower(
    config: ModelConfig, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(config, figures((1e-6, 1e-6), (1.2e-6, 7.1e-6)))
    tree = {"model": {"fp32_head": True, "dtype": "bfloat16"}, "engine": {"native": False}}
    assert resolve_auto(Recipe.parse(tree), warn=True).model.dtype == "bfloat16"
    assert "model.dtype bfloat16" in caplog.text and "7.1x slower in training" in caplog.text
    tree["model"] |= {"dtype": "float32"}
    assert resolve_auto(Recipe.parse(tree), warn=True).model.dtype == "float32"
    assert len(caplog.messages) == 1


def test_a_run_that_goes_on_keeps_its_dtype_and_full_training_is_fp32(tmp_path: Path) -> None:
    """Neither measures: the run folder's recipe has the dtype, and parameters are trained in fp32."""
    recipe = Recipe.parse({})
    assert recipe.model.dtype == "auto"
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse({"model": {"dtype": "bfloat16"}})))
    assert resolve_auto(recipe, run=run.path).model.dtype == "bfloat16"
    assert resolve_auto(Recipe.parse({"adapter": {"kind": "full"}})).model.dtype == "float32"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"busy": false}', "[" * 100_000, '{"busy": false, "float32": 1, "bfloat16": 2}']
    + [figures((1e-6, value), (1e-6, 1e-6)) for value in (0.0, -1.0, float("nan"), float("inf"))]
    + [figures((1e-6, 1e-6), (1e-6, 1e-6), busy=None)],
)
def test_a_spoilt_cache_is_measured_anew(
    config: ModelConfig, own_cache: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody may write into a cache: a bad thread cache once ended runs in KeyError or OverflowError."""
    keep(config, text)
    (file,) = own_cache.rglob("products-*.json")
    assert read_cached(file, products.parse_cache) is None
    assert len(caplog.messages) == 1 and "is not used" in caplog.text


def test_what_is_measured_is_kept_and_anything_else_is_another_measurement(
    config: ModelConfig, own_cache: Path
) -> None:
    """What was kept for one model, one head and one instruction set is not taken for another."""
    found = find_seconds(config, **HOW, budget_s=0.0, busy=False)
    assert find_seconds(config, **HOW, budget_s=0.0) == found
    wanted = products.list_products(config)
    wider = products.list_products(
        dataclasses.replace(config, intermediate_size=2 * config.intermediate_size)
    )
    others = ((wanted, "torch"), (wanted, "kernels-1"), (wider, "torch"))
    files = {cache_file(*which, fp32_head=True) for which in others}
    assert len(files | {cache_file(wanted, "torch", fp32_head=False)}) == 4
