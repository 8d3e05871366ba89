"""Find the Hugging Face folder of a model by its name: packaged assets, SmolLM2, folders, hub names."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"
SMOLLM = "smollm2-135m"
HUB_NAME = r"[\w.-]+/[\w.-]+"


def find_model_folder(path: str) -> Path:
    """Return the Hugging Face folder of ``model.path``. A model of the hub is downloaded, and one in GGUF is
    converted into the user's cache, unless that was done before.

    Raises ValueError when there is no such model, and when it cannot be downloaded or converted.
    """
    if path == SMOLLM:
        from ostinato.model.gguf import make_smollm2_folder

        return make_smollm2_folder()
    if is_gguf(path):
        from ostinato.model.gguf import make_gguf_folder

        return make_gguf_folder(Path(path).expanduser())
    return find_local_folder(path) or _download(path)


def is_gguf(path: str) -> bool:
    """Return whether ``path`` is the name of an existing file of llama.cpp's format."""
    return path.endswith(".gguf") and Path(path).expanduser().is_file()


def find_local_folder(path: str) -> Path | None:
    """Return the folder of ``model.path``, or None for a model that has to be downloaded or converted first.

    Raises ValueError if ``path`` cannot be a model.
    """
    if path.startswith("asset:"):
        return _find_asset(path)
    if is_gguf(path):
        return None
    folder = Path(path).expanduser()
    if path != SMOLLM and (folder / "config.json").is_file():
        return folder
    if path != SMOLLM and (folder.exists() or not re.fullmatch(HUB_NAME, path)):
        fix = f'"asset:seed-moe", "{SMOLLM}", a folder with config.json, a file in GGUF, or a hub name'
        raise ValueError(f"model.path is {path!r}, which is no Hugging Face folder; give {fix}")
    return None


def _find_asset(path: str) -> Path:
    """Return the folder of a packaged model. Raises ValueError if there is none of this name."""
    name = path.removeprefix("asset:")
    names = sorted(folder.parent.name for folder in ASSETS.glob("*/config.json"))
    if name in names:
        return ASSETS / name
    matches = difflib.get_close_matches(name, names, n=1)
    fix = (
        f"did you mean asset:{matches[0]}?"
        if matches
        else f"the packaged models are: {', '.join(names) or 'none'}"
    )
    raise ValueError(f"model.path is {path!r}, which is not packaged; {fix}")


def _download(name: str) -> Path:
    """Download a model of the hub, unless it is in the hub's cache; return its folder. Raises ValueError."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ValueError(
            f'model.path is {name!r}, a hub name, but huggingface_hub is missing; pip install "ostinato[hub]"'
        ) from error
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "tokenization_*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.path is {name!r}, which could not be downloaded ({reason}); give a folder instead"
        ) from error


def is_model_name(name: str) -> bool:
    """Whether ``name`` can only mean a model: an asset, SmolLM2, GGUF, a folder with config.json, a hub
    name."""
    path = Path(name).expanduser()
    return (
        name.startswith("asset:")
        or name == SMOLLM
        or is_gguf(name)
        or (path / "config.json").is_file()
        or (is_hub_name(name) and path.suffix != ".toml")
    )


def is_hub_name(name: str) -> bool:
    """Whether ``name`` is of the form owner/name and no local folder or file."""
    return re.fullmatch(HUB_NAME, name) is not None and not Path(name).expanduser().exists()
