"""What keys and values get of a device, and what is said when it is full."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worlds import tiny_decoder

from ostinato.apps.plan.problem import find_model
from ostinato.config import Recipe
from ostinato.launch import RunFailed
from ostinato.launch.device_memory import (
    MIN_CACHE_MB,
    Need,
    check_room,
    choose_kv_memory_mb,
    compute_step_need,
    estimate_terms,
    find_sheet_flops,
    lends_memory,
    name_out_of_memory,
    read_host_memory,
)
from ostinato.launch.machine import expects_gpu
from ostinato.launch.models import load_recipe
from ostinato.pipeline.account import compute_utilisation

FEW = Need(prompts=2, group=4, prompt_tokens=20, answer_tokens=12)


def test_a_pool_is_as_large_as_the_batch() -> None:
    """512 MB were 3,632 tokens of Qwen3-8B: a longer answer was refused, and 64 sequences of a model of 1.5B
    waited for each other without a word."""
    recipe, decoder = Recipe.load("quickstart"), tiny_decoder(max_position_embeddings=40_000)
    assert choose_kv_memory_mb(recipe, decoder, FEW) == MIN_CACHE_MB
    many = replace(FEW, prompts=64, group=16, answer_tokens=30_000)
    mb = choose_kv_memory_mb(recipe, decoder, many)
    token = 2 * 2 * (16 + 16) * 4  # layers, heads, keys and values, bytes
    assert mb > MIN_CACHE_MB and (mb << 20) >= 256 * 30_000 * token
    host = read_host_memory()
    assert host is None or (mb << 20) <= host


def test_siblings_share_their_prompt() -> None:
    alone = replace(FEW, prompts=8, group=1)
    assert FEW.count_tokens(4096, 256) < alone.count_tokens(4096, 256) < 8 * (20 + 12 + 64)
    assert FEW.count_tokens(4096, 3) < FEW.count_tokens(4096, 256)


def test_a_written_pool_stays_and_is_said_to_be_too_small(caplog: pytest.LogCaptureFixture) -> None:
    decoder = tiny_decoder(max_position_embeddings=40_000)
    recipe = Recipe.load("quickstart", "engine.kv_memory_mb=1")
    with caplog.at_level(logging.WARNING):
        assert choose_kv_memory_mb(recipe, decoder, FEW) == 1
        assert not caplog.records
        assert choose_kv_memory_mb(recipe, decoder, replace(FEW, answer_tokens=30_000)) == 1
    assert "engine.kv_memory_mb" in caplog.text


def test_what_is_played_ahead_is_needed_too() -> None:
    one, three = (compute_step_need(Recipe.load("quickstart", f"pipeline.staleness={k}"), 48) for k in (0, 2))
    assert three.prompts == 3 * one.prompts


def test_a_lent_pool_is_not_beside_activations(caplog: pytest.LogCaptureFixture) -> None:
    """Qwen3-8B whose pool takes what the activations of a step take too: one after the other they fit."""
    config, keys = find_model("qwen3-8b").config, ("model.dtype=bfloat16", "rollout.max_tokens=4096")
    keys = (*keys, "trainer.tokens_per_microbatch=8192", "engine.kv_memory_mb=40000")
    check_room(Recipe.load("quickstart", *keys), config, CARD)
    assert caplog.text == ""
    check_room(Recipe.load("quickstart", *keys, "pipeline.staleness=1"), config, CARD)
    assert "are needed" in caplog.text


def test_a_sampler_lends_its_memory_only_where_no_answer_goes_on() -> None:
    assert lends_memory(Recipe.load("quickstart"), SimpleNamespace(device=torch.device("cuda")))  # type: ignore[arg-type]
    recipe = Recipe.load("quickstart", "engine.backend=vllm")
    decoder: Any = SimpleNamespace(device=torch.device("cuda"), config=tiny_decoder().config)
    assert lends_memory(recipe, decoder)
    ahead = ("pipeline.staleness=1", "pipeline.overlap=true")
    assert not lends_memory(Recipe.load("quickstart", "engine.backend=vllm", *ahead), decoder)
    assert not lends_memory(recipe, tiny_decoder())
    at = ("engine.backend=vllm", "engine.address=http://host:1")
    assert not lends_memory(Recipe.load("quickstart", *at), decoder)


def test_the_memory_of_a_host_is_what_it_can_give(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable:   40 kB\nHuge\n")
    assert read_host_memory(tmp_path / "meminfo") == 40 * 1024
    assert read_host_memory(tmp_path / "none") is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
    ],
)
def test_a_full_device_ends_a_run_by_name(error: RuntimeError) -> None:
    """Qwen3-30B-A3B on 80 GB ended in a traceback in the first step; recomputing fits."""
    recipe = Recipe.load("quickstart", "model.dtype=bfloat16", "engine.kv_memory_mb=700")
    with (
        pytest.raises(RunFailed, match=r"0\.7.*trainer\.recompute|kv_memory_mb"),
        name_out_of_memory(recipe, ""),
    ):
        raise error
    with pytest.raises(RuntimeError, match="shapes"), name_out_of_memory(recipe, ""):
        raise RuntimeError("shapes do not fit")


def test_terms_are_the_planners() -> None:
    config, keys = find_model("qwen3-8b").config, ("model.dtype=bfloat16", 'adapter.targets=["attn","mlp"]')
    kept, again = (
        estimate_terms(Recipe.load("quickstart", *keys, f"trainer.recompute={on}"), config)
        for on in ("false", "true")
    )
    assert kept["base weights"] == again["base weights"] == pytest.approx(16.38e9, rel=0.01)
    assert kept["activations"] > 5 * again["activations"] and "context" not in kept


CARD = 85.5e9  # bytes, as an H100 of 80 GB says


def test_what_cannot_fit_is_refused_before_weights_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """Where activations alone are too much a microbatch is halved at run time, so that is only said."""
    config = find_model("qwen3-32b").config

    def check(rows: int, free: float, *keys: str) -> str:
        sizes = (f"trainer.tokens_per_microbatch={rows}", "rollout.max_tokens=4096", "trainer.recompute=true")
        recipe = Recipe.load("quickstart", "model.dtype=bfloat16", "adapter.rank=32", *sizes, *keys)
        caplog.clear()
        check_room(recipe, config, free)
        return caplog.text

    assert check(4096, CARD, "engine.kv_memory_mb=auto") == ""
    assert "trainer.tokens_per_microbatch" in check(32_768, CARD, "engine.kv_memory_mb=auto")
    with pytest.raises(RunFailed, match=r"weights 65\.5.*free"):
        check(4096, 60e9)


@pytest.mark.parametrize(
    ("device", "environ", "there", "expected"),
    [
        ("cpu", {}, True, False),
        ("cuda:1", {}, False, True),
        ("auto", {}, False, False),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, True, False),
    ],
)
def test_a_gpu_is_expected_before_torch_is_loaded(
    device: str, environ: dict[str, str], there: bool, expected: bool, tmp_path: Path
) -> None:
    """Up to two minutes went by with products of the CPU, on machines whose GPU multiplies."""
    driver = tmp_path / "nvidiactl"
    if there:
        driver.touch()
    assert expects_gpu(device, environ, driver) is expected


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA RTX A6000", 154.8),
        ("T4", 0),
    ],
)
def test_utilisation_is_of_the_data_sheet(name: str, tflops: float) -> None:
    """Nothing said how much of a GPU training uses."""
    assert find_sheet_flops(name) == tflops * 1e12
    row = {"flops/train": 2e15, "time/train_s": 4.0}
    assert compute_utilisation(row, 1e15) == {"train/mfu": 0.5}
    assert compute_utilisation(row, 0.0) == compute_utilisation({"time/train_s": 4.0}, 1e15) == {}


def test_a_bare_model_has_no_head_of_quickstart() -> None:
    """Every command that is given a model took over the fp32 head that quickstart chose for its own: on a GPU
    a copy of the head in fp32 for every token."""
    assert not load_recipe("smollm2-135m")[0].model.fp32_head
    assert load_recipe("smollm2-135m", "model.fp32_head=true")[0].model.fp32_head
    assert load_recipe("asset:seed-moe")[0].model.fp32_head
