"""Optional metric writers beside the JSONL of the run folder: tensorboard, trackio, wandb.

Each takes (step, metrics) and has TRL's metric names already. A missing package is a ValueError that
names the extra, before work starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ostinato.protocols import MetricWriter


class TensorBoardWriter:
    """Event files in ``<run>/tensorboard``."""

    def __init__(self, folder: Path) -> None:
        _need("tensorboard", "tensorboard")
        self._events = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()


class ClientWriter:
    """wandb and trackio, which share ``init`` and ``log``."""

    def __init__(self, package: str, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._client = _need(package, package)
        where = {"dir": str(folder)} if package == "wandb" else {}
        self._client.init(project="ostinato", name=folder.name, config=dict(recipe), **where)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._client.log(dict(metrics), step=step)


def check_writers(names: Sequence[str]) -> None:
    """Raises ValueError for a writer whose package is missing: to be known before there is a run folder."""
    for name in names:
        _need(name, name)


def open_writers(names: Sequence[str], folder: Path, recipe: Mapping[str, Any]) -> list[MetricWriter]:
    """The writers of ``log.writers`` for the run in ``folder``."""
    return [
        TensorBoardWriter(folder) if name == "tensorboard" else ClientWriter(name, folder, recipe)
        for name in names
    ]


def _need(package: str, writer: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(
            f'log.writers has {writer!r} but the package {package!r} is missing; pip install "ostinato[log]"'
        ) from error
