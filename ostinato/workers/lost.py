"""The one exception of supervision: a worker was lost."""

from __future__ import annotations

from enum import StrEnum

from ostinato.failure import Lost


class WorkerKind(StrEnum):
    """The kinds of workers."""

    SAMPLER = "sampler"
    TRAINER = "trainer"
    GRADER = "grader"
    RANK = "rank"
    VLLM = "vllm"
    CLUSTER = "cluster"  # what all workers of a run depend on

    @classmethod
    def of(cls, name: str) -> WorkerKind:
        """The kind of a worker from its name: SAMPLER for "sampler-0"."""
        return cls(name.partition("-")[0])


class WorkerLost(Lost):
    """A worker died, stopped answering, made no progress, could not be reached, or serves what was not
    published. The message is ``name`` and ``cause``.

    kind: the kind of worker; name: its name, "" if ``cause`` is a whole sentence about one or several;
    final: no other one can replace it. Only a sampler is ever replaced; all other losses end the run.
    """

    def __init__(self, kind: WorkerKind, cause: str, name: str = "", final: bool = False) -> None:
        super().__init__(kind, cause, name, final)  # the same arguments, for pickle
        self.kind, self.cause, self.name, self.final = kind, cause, name, final

    def __str__(self) -> str:
        return f"{self.name} {self.cause}".strip()
