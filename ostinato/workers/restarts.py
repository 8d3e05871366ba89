"""The budget of restarts: how often in a row a worker may be lost, and the pause before the next one."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.workers.lost import WorkerLost

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

    def lose(self, lost: WorkerLost, work: str, mend: str) -> None:
        """Count a loss. Raises ``lost`` itself where it is final, and a final one when the budget is spent;
        ``work`` was not done in between, ``mend`` is what to look at."""
        if lost.final:
            raise lost
        self.in_a_row += 1
        if self.spent:
            raise WorkerLost(
                lost.kind,
                f"{self.in_a_row} {lost.kind}s in a row were lost without {work} in between, at last: "
                f"{lost}; look at {mend} and at cluster.max_restarts",
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


__all__ = ["LONGEST_PAUSE_S", "Restarts"]
