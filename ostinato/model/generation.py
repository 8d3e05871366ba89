"""What a model's ``generation_config.json`` says of sampling: the defaults of who gives none. Training does
not read it: there the keys of ``[rollout]`` rule. No torch here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.inputs import parse_json

logger = logging.getLogger(__name__)
FILE = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """In force where a request has no value of its own."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Those of a model, as vLLM reads them: temperature, top_k, top_p and min_p, whatever ``do_sample`` says.
    A penalty, which is not computed, is named in a warning. Raises ValueError for a value that is none."""
    file = folder / FILE
    try:
        given: Any = parse_json(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); save it again") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} holds a {type(given).__name__}; it must hold a JSON object, save it again")
    bounds = {"temperature": (0, 100), "top_k": (-1, 2**31 - 1), "top_p": (1e-9, 1), "min_p": (0, 1)}
    found: dict[str, Any] = {}
    for key, (least, most) in bounds.items():
        kinds = int if key == "top_k" else int | float
        if (value := given.get(key)) is None:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{key} of {file} is {value!r}; give a number from {least:g} to {most:g}")
        found[key] = max(value, 0)
    if (penalty := given.get("repetition_penalty")) not in (None, 1, 1.0):
        logger.warning(f"{file}: its repetition_penalty of {penalty} is not computed here, and left out")
    return SamplingDefaults(**found)
