"""Read the sampling defaults in a model's ``generation_config.json``. Training does not use them: there the
keys of ``[rollout]`` apply. No torch here."""

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
    """Values for requests that do not set their own."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read the defaults of a model as vLLM does: temperature, top_k, top_p and min_p, whatever ``do_sample``
    is. What the file does not set is at its default, also where there is no file. A repetition penalty is not
    computed, and logged as a warning. Raises ValueError for a file that is no JSON object and for an invalid
    value."""
    file = folder / FILE
    try:
        settings: Any = parse_json(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); save it again") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"{file} holds a {type(settings).__name__}; it must hold a JSON object, save it again"
        )
    ranges = {"temperature": (0, 100), "top_k": (-1, 2**31 - 1), "top_p": (1e-9, 1), "min_p": (0, 1)}
    defaults: dict[str, Any] = {}
    for key, (minimum, maximum) in ranges.items():
        allowed_types = int if key == "top_k" else int | float
        if (value := settings.get(key)) is None:
            continue
        if not isinstance(value, allowed_types) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ValueError(f"{key} of {file} is {value!r}; give a number from {minimum:g} to {maximum:g}")
        defaults[key] = max(value, 0)  # a top_k of -1 means off, as 0 does
    if (penalty := settings.get("repetition_penalty")) not in (None, 1, 1.0):
        logger.warning(f"{file}: its repetition_penalty of {penalty} is not computed here, and left out")
    return SamplingDefaults(**defaults)
