"""An engine for one of several loops: the view of a shared engine that serves each loop's policy by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.local import LocalEngine
from ostinato.model.lora import Adapters
from ostinato.types import Completion, Emitted, Request


class PolicyView:
    """Implements ``protocols.Engine`` on the engine of ``thread``, whose passes the sequences of all views
    share. ``policy`` is the name under which this one's adapters are served; ``share``: its weight among the
    sequences that wait for a slot. Calls come from one event loop, any but the engine's."""

    def __init__(self, thread: EngineThread[LocalEngine], policy: str, share: float = 1.0) -> None:
        self._thread, self._policy, self._share = thread, policy, share
        self._num_open, self._progress = 0, 0.0

    def publish(self, adapters: Adapters | None, version: int) -> None:
        """Serve a copy of ``adapters`` (None: the base) to requests that follow; running ones end under the
        policy that they began with. Raises NotFinite, changing nothing."""

        def publish(engine: LocalEngine) -> None:
            engine.publish(adapters, version, self._policy)
            engine.shares[self._policy] = self._share

        self._thread.run(publish)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests finish; they name no policy. Raises the engine's errors."""
        named = [replace(request, policy=self._policy) for request in requests]
        self._num_open += 1
        try:
            async with aclosing(self._thread.generate(named, stream=False)) as events:
                async for index, completion in events:
                    assert not isinstance(completion, Emitted), "nothing is streamed"
                    yield index, completion
        finally:
            self._num_open -= 1

    @property
    def progress(self) -> float:
        """Tokens that the engine has run, as of the last look at which requests of this view were open: it
        stays where its caller waits for something else."""
        if self._num_open:
            self._progress = self._thread.engine.counters.decoded + self._thread.engine.counters.prefilled
        return self._progress

    def close(self) -> None:
        """Stop serving the policy."""

        def withdraw(engine: LocalEngine) -> None:
            engine.withdraw(self._policy)
            engine.shares.pop(self._policy, None)

        self._thread.run(withdraw)
