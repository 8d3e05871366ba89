"""The packaged seed model: its size, its tokenizer, what its recipe writes, and where it starts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import answers

import ostinato
from ostinato.engine.local import LocalEngine
from ostinato.env.arithmetic import draw_prompts
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.render import Renderer
from ostinato.reward.verify import exact
from ostinato.types import Request, Sampling

FOLDER = Path(ostinato.__file__).parent / "assets" / "seed-moe"
RECIPE = Path(__file__).parents[3] / "recipes" / "seed_moe.py"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("seed_moe_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(FOLDER)


def read_log() -> list[dict]:
    return [json.loads(line) for line in (FOLDER / "train_log.jsonl").read_text().splitlines()]


def test_it_is_small_and_sparse_with_one_dense_layer() -> None:
    decoder, config = load_model(FOLDER, dtype=torch.bfloat16), read_config(FOLDER)
    assert 5e6 <= sum(p.numel() for p in decoder.parameters()) <= 10e6
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16e6
    assert config.model_type == "qwen3_moe" and config.moe is not None
    assert set(range(config.num_layers)) - set(config.moe.layers) == {0}


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    renderer = Renderer(FOLDER)
    assert renderer.decode(renderer.encode(text), skip_special=False) == text


def test_digits_stand_alone(renderer: Renderer) -> None:
    assert len(renderer.encode("3141592653")) == 10


def test_chats_are_rendered_as_chatml(renderer: Renderer) -> None:
    chat = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": "1 + 1 = ?"}]
    assert renderer.chat_text(chat) == (
        "<|im_start|>system\nBe careful.<|im_end|>\n"
        "<|im_start|>user\n1 + 1 = ?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(renderer.encode(END)) == 1
    assert renderer.vocab_size == read_config(FOLDER).vocab_size


def test_the_recipe_writes_the_packaged_files(recipe: ModuleType, tmp_path: Path) -> None:
    recipe.write_folder(tmp_path, read_log()[0]["seed"])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), name
    assert read_config(tmp_path) == read_config(FOLDER)


def test_the_ladder_has_a_size_for_each_step(recipe: ModuleType, tmp_path: Path) -> None:
    sizes = {}
    for name, architecture in recipe.SIZES.items():
        recipe.write_folder(tmp_path / name, 0, architecture)
        config = read_config(tmp_path / name)
        sizes[name] = round(sum(p.numel() for p in Decoder(config).parameters()) / 1e6, 2)
    assert sizes == {"dense-0.5m": 0.5, "dense-2m": 2.31, "moe-6m": 5.86, "moe-19m": 19.29, "moe-64e": 10.61}


@pytest.mark.slow
def test_it_starts_where_rl_has_room(renderer: Renderer) -> None:
    """A small sample of what the log says: wide bounds, so that only a broken checkpoint or engine fails."""
    engine = LocalEngine(load_model(FOLDER), decode=renderer.decode, kv_memory_mb=64)
    prompts = draw_prompts("eval", 1234, 16)
    sampling = Sampling(max_tokens=64, stop_tokens=(int(renderer.encode(END)[0]),))
    requests = [
        Request(tokens=renderer.prompt(p), sampling=sampling, seed=(0, i, s))
        for i, p in enumerate(prompts)
        for s in range(8)
    ]
    completions = answers(engine, requests)
    wanted = [p.columns["answer"] for p in prompts for _ in range(8)]
    right = np.array(exact([c.text for c in completions], wanted)).reshape(16, 8)
    assert 0.1 < right.mean() < 0.55
    assert right.max(1).mean() > 0.5
    assert all(c.stop == "eos" for c in completions)
