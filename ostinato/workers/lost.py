"""The one exception of supervision: a worker was lost."""

from __future__ import annotations

from dataclasses import dataclass
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
    final: no other worker can replace it, so the run ends; by_calls: the calls that it was serving may be
    the cause (``suspects``).
    """

    def __init__(
        self, kind: WorkerKind, cause: str, name: str = "", final: bool = False, by_calls: bool = True
    ) -> None:
        super().__init__(kind, cause, name, final, by_calls)  # the same arguments, for pickle
        self.kind, self.cause, self.name = kind, cause, name
        self.final, self.by_calls = final, by_calls

    def __str__(self) -> str:
        return f"{self.name} {self.cause}".strip()


LONGEST_PAUSE_S = 30.0
MOST_DOUBLINGS = 10


@dataclass(slots=True, kw_only=True)
class Restarts:
    """The restart budget of one worker, or of several: ``most`` losses in a row without work in between.
    The pause before a restart is ``pause_s`` times 0, 1, 3, 7 ... up to LONGEST_PAUSE_S."""

    most: int
    pause_s: float = 0.0
    in_a_row: int = 0

    def worked(self) -> None:
        """Work was done: reset the budget."""
        self.in_a_row = 0

    def lose(self, lost: WorkerLost, work: str, fix: str) -> None:
        """Count a loss. Raises ``lost`` itself if it is final, and a final one if the budget is spent. Its
        message says that no ``work`` was done in between, and to look at ``fix``."""
        if lost.final:
            raise lost
        self.in_a_row += 1
        if self.spent:
            raise WorkerLost(
                lost.kind,
                f"{self.in_a_row} {lost.kind}s in a row were lost without {work} in between, at last: "
                f"{lost}; look at {fix} and at cluster.max_restarts",
                final=True,
            ) from lost

    @property
    def spent(self) -> bool:
        return self.in_a_row > self.most

    @property
    def wait_s(self) -> float:
        """Seconds to wait before the worker is started again."""
        doublings = min(max(self.in_a_row - 1, 0), MOST_DOUBLINGS)
        return min(self.pause_s * (2**doublings - 1), LONGEST_PAUSE_S)
