"""From what a user calls a model to its shape: built-in names, folders, a config.json. No weights."""

from __future__ import annotations

import difflib
from pathlib import Path

from ostinato.inputs import parse_json
from ostinato.model.config import ModelConfig, parse_config, read_config
from ostinato.plan.problem import Model

_MODELS = Path(__file__).parent / "models"
_ASSETS = Path(__file__).parent.parent / "assets"


def known_models() -> tuple[str, ...]:
    """The built-in names."""
    packaged = (folder.parent.name for folder in _ASSETS.glob("*/config.json"))
    return tuple(sorted([*(file.stem for file in _MODELS.glob("*.json")), *packaged]))


def find_model(name: str) -> Model:
    """The model behind a built-in name ("kimi-k2", "asset:seed-moe"), a folder or a path to a config.json.

    Raises ValueError, in one sentence, where there is none, or where its config.json is not supported.
    """
    short = name.removeprefix("asset:").lower()
    if (file := _MODELS / f"{short}.json").is_file():
        return Model(name=short, config=parse_config(parse_json(file.read_bytes())))
    if (_ASSETS / short / "config.json").is_file():
        return Model(name=short, config=read_config(_ASSETS / short))
    path = Path(name).expanduser()
    if path.is_dir():
        return Model(name=path.resolve().name, config=read_config(path))
    if path.is_file():
        return Model(name=path.resolve().parent.name, config=_read(path))
    near = difflib.get_close_matches(short, known_models(), n=1)
    mend = f"did you mean {near[0]}" if near else f"the built-in ones are {', '.join(known_models())}"
    raise ValueError(f"model is {name!r}, no built-in name and no config.json; {mend}")


def _read(path: Path) -> ModelConfig:
    try:
        raw = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"model is {path}, which is not valid JSON ({error}); give a config.json") from error
    if not isinstance(raw, dict):
        raise ValueError(f"model is {path}, which holds a {type(raw).__name__}; give a config.json")
    return parse_config(raw)


__all__ = ["find_model", "known_models"]
