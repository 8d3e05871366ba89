"""The calls of a pool that have not ended: which of them waits, and which worker gets which.

    add -> waiting --place--> dealt to a worker -> answered
              ^                     |
              +---- the worker is lost (take_back)

Prompts that were on two lost workers run apart from the others, in smaller and smaller sets; a prompt that
loses one more worker when it runs alone is quarantined: it ends as ERROR (``workers.suspects``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from ostinato.engine.pool_worker import Call, Results, Worker, fault, sampler_lost
from ostinato.engine.serve import failed
from ostinato.jobs import Placement, Starts
from ostinato.types import Completion, Request, Stop
from ostinato.workers.lost import WorkerLost
from ostinato.workers.suspects import Key, Suspects, isolated

Serving = Callable[[], Mapping[int, Worker]]
HOMES = 10_000  # conversations whose worker is remembered


class OpenCalls:
    """``placement`` says which worker samples what, ``serving`` gives those that it can choose from; workers
    that are lost within ``window_s`` of each other may have a cause in common. ``counters`` are added to."""

    def __init__(
        self, placement: Placement, serving: Serving, window_s: float, counters: Counter[str]
    ) -> None:
        self.waiting: dict[int, Call] = {}
        self.suspects = Suspects(window_s)
        self._placement, self._serving, self._counters = placement, serving, counters
        self._open: dict[Key, set[Call]] = {}
        self._homes: dict[tuple[int, ...], int] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, index: int, request: Request, expected: float, results: Results) -> Call:
        call = Call(
            id=next(self._ids),
            index=index,
            request=request,
            results=results,
            expected=expected,
            home=self._homes.pop(request.seed, None),
        )
        self._open.setdefault(call.key, set()).add(call)
        self.waiting[call.id] = call
        self._end_quarantined([call])
        return call

    def abandon(self, calls: Iterable[Call]) -> None:
        """Drop these calls: their callers no longer wait for them."""
        workers = self._serving().values()
        for call in calls:
            if call.awaited:
                self._leave(call)
                for worker in workers:
                    worker.drop(call)

    def fail(self, error: Exception) -> None:
        """Give every open call ``error`` as its result."""
        for call in itertools.chain(*self._open.values()):
            call.results.put_nowait(error)

    def _end(self, call: Call, completion: Completion) -> None:
        if call.awaited:
            self._leave(call)
            call.results.put_nowait((call.index, completion))

    def _leave(self, call: Call) -> None:
        call.awaited = False
        self.waiting.pop(call.id, None)
        self._open[call.key].discard(call)
        if not self._open[call.key]:
            del self._open[call.key]
            self.suspects.forget(call.key)

    # ---- placement

    def place(self) -> None:
        """Assign the waiting calls to workers."""
        workers = self._serving()
        if not workers or not self.waiting:
            return
        cells, waiting = self.suspects.cells, sorted(self.waiting.values(), key=lambda call: call.id)
        closed = frozenset[int]()
        if cells:
            waiting = [call for call in waiting if call.key not in self.suspects.accused]
            closed = self._place_suspects([call for call in waiting if call.key in cells], workers)
        open = [worker.as_job_worker() for id, worker in workers.items() if id not in closed]
        jobs = [call.job() for call in waiting if call.key not in cells]
        starts = self._placement(jobs, open) if open else ()
        if jobs and not starts and open and not any(worker.jobs for worker in open):
            starts = ((jobs[0].id, open[0].id),)  # whatever it waits for, nothing will happen by itself
        self._follow(starts, workers)

    def _place_suspects(self, waiting: Sequence[Call], workers: Mapping[int, Worker]) -> frozenset[int]:
        """Assign suspects cell by cell. Returns the workers reserved for one cell."""
        cells = self.suspects.cells
        held = {id: {call.key for call in worker.all_calls} for id, worker in workers.items()}
        places, closed = isolated([*dict.fromkeys(cells[call.key] for call in waiting)], cells, held)
        for call in waiting:
            if (cell := cells[call.key]) in places:
                self._deal(call, workers[places[cell]])
        return closed

    def _follow(self, starts: Starts, workers: Mapping[int, Worker]) -> None:
        for id, worker in starts:
            self._deal(self.waiting[id], workers[worker])
        for worker in workers.values():
            worker.fill()

    def _deal(self, call: Call, worker: Worker) -> None:
        self.waiting.pop(call.id, None)
        worker.deal(call)

    # ---- what comes back

    def answered(self, worker: Worker, id: int, completion: Completion) -> bool:
        """End the call; whether the answer is no ERROR. Raises WorkerLost where it cannot be right."""
        call = worker.calls.get(id)
        if call is None:
            raise sampler_lost(f"answered call {id}, which it does not have", by_calls=False)
        if wrong := fault(call, completion, worker.versions(call)):
            raise sampler_lost(wrong, by_calls=False)
        if completion.stop is Stop.ABORT and call.awaited:
            raise sampler_lost(f"gave up prompt {call.prompt}, which was not cancelled")
        del worker.calls[id]
        if len(self._homes) >= HOMES:
            self._homes.pop(next(iter(self._homes)))
        self._homes[call.request.seed] = worker.id
        self._end(call, completion)
        return completion.stop is not Stop.ERROR

    def take_back(self, worker: Worker, lost: WorkerLost, now: float) -> bool:
        """Queue its unfinished calls again. True: the loss is explained by its calls."""
        handed = [call for call in worker.calls.values() if call.handed]
        self._counters["workers/redispatched"] += sum(call.awaited for call in handed)
        for call in worker.all_calls:
            if call.awaited:
                self.waiting[call.id] = call
        keys = [*dict.fromkeys(call.key for call in handed)]
        blamed = keys if lost.by_calls and not worker.publishing else []
        explained = self.suspects.blame(worker.id, now, blamed, str(lost))
        for key in set(keys) - self._open.keys():
            self.suspects.forget(key)  # nothing waits for it
        return explained

    def judge(self, now: float) -> bool:
        """Quarantine the prompts that are certain to be at fault by now; whether there were any."""
        found = self.suspects.judge(now)
        self._counters["workers/quarantined"] += len(found)
        self._end_quarantined([*self.waiting.values()])
        return bool(found)

    def _end_quarantined(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if cause := self.suspects.quarantined.get(call.key):
                self._end(call, failed(cause))
