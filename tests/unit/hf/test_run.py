"""A run on a model that our decoder has not, from its folder to an adapter of PEFT's; resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import OTHERS, saved, with_tokenizer

pytest.importorskip("transformers", minversion="5.0")
peft = pytest.importorskip("peft")

from ostinato.config import Recipe  # noqa: E402
from ostinato.hf.factors import read_folder  # noqa: E402
from ostinato.hf.model import load_transformers  # noqa: E402
from ostinato.launch.machine import choose_backend, resolve_backend  # noqa: E402
from ostinato.launch.session import learn, resume  # noqa: E402
from ostinato.model.named import find_model_folder  # noqa: E402


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(saved("gemma2", tmp_path_factory.mktemp("gemma2"), **OTHERS["gemma2"]))


def recipe_of(folder: Path, runs: Path, steps: int, **keys: Any) -> Recipe:
    settings = {
        "model.path": folder,
        "model.fp32_head": "false",
        "model.device": "cpu",
        "trainer.steps": steps,
        "trainer.checkpoint_every": 1,
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 4,
        "rollout.max_tokens": 6,
        "reward.functions": '["lengths.py:length"]',
        "eval.n": 2,
        "eval.at_start": "false",
        "log.dir": runs,
        **keys,
    }
    (runs / "lengths.py").write_text(
        "def length(completions, **columns):\n    return [len(str(one)) % 7 / 7 for one in completions]\n"
    )
    settings["reward.functions"] = f'["{runs / "lengths.py"}:length"]'
    return Recipe.load("quickstart", *(f"{key}={value}" for key, value in settings.items()))


@pytest.mark.slow  # three runs of a command each, five seconds
def test_a_run_of_gemma2_learns_resumes_and_exports(gemma: Path, tmp_path: Path) -> None:
    whole = learn(recipe_of(gemma, tmp_path, 3), quiet=True)
    part = learn(recipe_of(gemma, tmp_path, 2), quiet=True)
    resume(part.folder, "trainer.steps=3", quiet=True)
    model = load_transformers(gemma, dtype=torch.float32, device="cpu")
    first, second = (
        read_folder(folder / "adapter", model.sites, "cpu").list_leaves()
        for folder in (whole.folder, part.folder)
    )
    assert first.keys() == second.keys() and any(leaf.abs().sum() > 0 for leaf in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert 'backend = "transformers"' in (whole.folder / "recipe.toml").read_text()
    peft.PeftModel.from_pretrained(model.model, str(whole.folder / "adapter"))


def test_auto_takes_our_decoder_where_it_has_the_family(gemma: Path, tmp_path: Path) -> None:
    assert choose_backend(find_model_folder("asset:seed-moe"))[0] == "native"
    name, why = choose_backend(gemma)
    assert name == "transformers" and "gemma2" in why


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.exact", "true"),
        ("engine.weights", "int8"),
        ("model.fp32_head", "true"),
        ("cluster.samplers", 2),
        ("parallel.layout", "d2"),
        ("parallel.layout", "d2t2f2"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    gemma: Path, tmp_path: Path, key: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=key):
        resolve_backend(recipe_of(gemma, tmp_path, 1, **{key: value}))


@pytest.mark.slow  # six runs, four of them on two ranks
def test_two_ranks_train_and_sample_with_parts_of_the_model(tmp_path: Path) -> None:
    """Answers and the adapter are those of one process; a run goes on with its ranks, and without them."""
    folder = with_tokenizer(saved("qwen3", tmp_path / "qwen3"))
    options = {"model.backend": "transformers", "model.dtype": "float32", "eval.at_start": "true"}
    runs = {}
    for name, steps, layout in (
        *(("one", 2, ""), ("two", 2, "d2f2"), ("begun", 1, "d2f2"), ("again", 1, "d2f2")),
    ):
        keys = {**options, "parallel.layout": layout} if layout else options
        runs[name] = learn(recipe_of(folder, tmp_path, steps, **keys), quiet=True)
    assert runs["one"].evals()[0]["reward"] == runs["two"].evals()[0]["reward"]
    resume(runs["begun"].folder, "trainer.steps=2", "parallel.layout=''", quiet=True)
    resume(runs["again"].folder, "trainer.steps=2", quiet=True)
    model = load_transformers(folder, dtype=torch.float32, device="cpu")
    first, *others = (
        read_folder(run.folder / "adapter", model.sites, "cpu").list_leaves() for run in runs.values()
    )
    for other in others:
        for leaf, expected in first.items():
            torch.testing.assert_close(other[leaf], expected, rtol=1e-4, atol=1e-5)
