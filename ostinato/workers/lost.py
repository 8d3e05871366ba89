"""The one exception of supervision: a worker was lost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.failure import NamedFailure


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


class WorkerLost(NamedFailure):
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


LONGEST_PAUSE_S = 30.0
MOST_DOUBLINGS = 10


@dataclass(slots=True, kw_only=True)
class Restarts:
    """Of one worker, or of workers that share a budget: ``most`` losses in a row, without work in between.
    The pause before a restart is ``pause_s`` times 0, 1, 3, 7 ... up to LONGEST_PAUSE_S."""

    most: int
    pause_s: float = 0.0
    in_a_row: int = 0

    def worked(self) -> None:
        """The budget is whole again."""
        self.in_a_row = 0

    def lose(self, lost: WorkerLost, work: str, fix: str) -> None:
        """Count a loss. Raises ``lost`` itself where it is final, and a final one when the budget is spent;
        ``work`` was not done in between, ``fix`` is what to look at."""
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
