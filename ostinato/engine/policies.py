"""The policies that an engine serves: the one that is trained, without a name, and others by name.

Each publication of a name gets a number that is never given again, so what was cached under an older policy
of the name is not found, and what runs under it ends as it has begun.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ostinato.engine.runner import Runner
from ostinato.model.lora import Adapters


class Policies:
    """Numbers by name, and versions by number, of what ``runner`` holds. The policy without a name is 0."""

    def __init__(self, runner: Runner) -> None:
        self.numbers: dict[str, int] = {"": 0}
        self.versions: dict[int, int] = {0: 0}
        self._runner, self._next = runner, 1

    def publish(self, adapters: Adapters | None, version: int, name: str = "") -> None:
        """Run a copy of ``adapters`` (None: the base) under ``name`` from now on."""
        number = self._next if name else 0
        self._runner.serve(adapters, number)
        self.numbers[name], self.versions[number] = number, version
        self._next += number > 0

    def versions_of(self, numbers: np.ndarray) -> np.ndarray:
        """[R] int32 of the policies with these numbers [R]."""
        return np.array([self.versions[number] for number in numbers.tolist()], np.int32)

    def retire(self, running: Iterable[int]) -> None:
        """Forget those that have lost their name and that nothing runs under."""
        for number in self.versions.keys() - {*self.numbers.values(), *running}:
            del self.versions[number]
            self._runner.retire(number)


__all__ = ["Policies"]
