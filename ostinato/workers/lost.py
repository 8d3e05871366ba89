"""The one exception of supervision: a worker was lost."""

from __future__ import annotations

from enum import StrEnum


class WorkerKind(StrEnum):
    """Of worker."""

    SAMPLER = "sampler"
    TRAINER = "trainer"
    GRADER = "grader"
    RANK = "rank"
    VLLM = "vllm"
    CLUSTER = "cluster"  # what all workers of a run depend on

    @classmethod
    def of(cls, name: str) -> WorkerKind:
        """That of a worker by its name: SAMPLER of "sampler-0"."""
        return cls(name.partition("-")[0])


class WorkerLost(RuntimeError):
    """A worker died, gave no sign of life, made no progress, could not be reached, or serves what was not
    published. The message is ``name`` and ``cause``.

    kind: of worker; name: of the worker, "" where ``cause`` is a whole sentence about one or several;
    final: no other worker can take its place, so the run ends; by_calls: the calls that it had may be the
    cause (``suspects``).
    """

    def __init__(
        self, kind: WorkerKind, cause: str, name: str = "", final: bool = False, by_calls: bool = True
    ) -> None:
        super().__init__(kind, cause, name, final, by_calls)  # as here, for pickles
        self.kind, self.cause, self.name = kind, cause, name
        self.final, self.by_calls = final, by_calls

    def __str__(self) -> str:
        return f"{self.name} {self.cause}".strip()


__all__ = ["WorkerKind", "WorkerLost"]
