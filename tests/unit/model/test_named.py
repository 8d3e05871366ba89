"""What a user may call a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.model.named import is_hub_name, is_model_name, model_folder


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("asset:no-such-asset", "not packaged"),
        ("nowhere", "no Hugging Face folder"),
        ("a/b/c", "no Hugging Face folder"),
        ("", "no Hugging Face folder"),
    ],
)
def test_what_is_no_model_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        model_folder(name)


def test_names_of_models_and_of_recipes_are_told_apart() -> None:
    assert all(map(is_model_name, ("asset:seed-moe", "smollm2-135m", "Qwen/Qwen3-0.6B")))
    assert not any(map(is_model_name, ("quickstart", "recipes/mine.toml", "runs", "tests/unit")))


def test_a_hub_name_is_not_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter trained on a hub model names its base by the hub name, not by this machine's cache."""
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_name("Qwen/Qwen3-0.6B")
    assert not any(map(is_hub_name, ("asset:seed-moe", "smollm2-135m", "/tmp/a/b", "a")))
