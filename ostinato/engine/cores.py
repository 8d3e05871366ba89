"""How this machine's cores are best used, as ``ostinato bench pipeline`` measured and kept it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.engine import threads
from ostinato.files import cache_folder, read_cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What this machine was measured to do best, when, and how busy others kept it then."""

    arm: str
    overrides: tuple[str, ...]
    at: float  # Unix seconds
    speeds: Mapping[str, float] = field(default_factory=dict)  # steps per second by arm
    busy: bool = False
    rounds: int = 1
    train_s: tuple[float, ...] = ()  # of the trainer's steps, for a replay


def kept_file() -> Path:
    """Beside the measured threads, and of the same machine."""
    return cache_folder() / f"pipeline-{threads.fingerprint()}.json"


def kept(path: Path) -> Kept | None:
    """The last result on this machine; None where there is none that can be read."""
    return read_cached(path, _parsed)


def _parsed(read: Any) -> Kept:
    """Raises ValueError, TypeError, LookupError or AttributeError for what the bench never wrote."""
    return Kept(
        arm=str(read["arm"]),
        overrides=tuple(map(str, read["overrides"])),
        at=_finite(read["at"]),
        speeds={str(name): _finite(speed) for name, speed in read["speeds"].items()},
        busy=bool(read["busy"]),
        rounds=int(read["rounds"]),
        train_s=tuple(map(_finite, read["train_s"])),
    )


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{value!r} is no finite number")
    return number
