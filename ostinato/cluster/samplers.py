"""``protocols.Sampler`` over a worker whose object is one too."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cluster.remote import Remote
from ostinato.types import PollResult, Publication, Request


class SamplerLink:
    """Forwards to a sampler elsewhere; every wait is bounded by ``silence_s`` beyond what was asked for.

    Raises WorkerGone when the worker died or is silent; what the sampler itself raises comes as itself.
    """

    def __init__(self, remote: Remote, silence_s: float) -> None:
        self.name = remote.name
        self._remote, self._silence_s = remote, silence_s

    async def built(self) -> SamplerLink:
        """Itself, once the sampler is there: a policy that it was sent before may be gone when it has loaded
        its model. A worker in which none comes to be, or is waited for no longer, is ended."""
        try:
            await self.collect(0.0)
        except BaseException:
            self._remote.kill()
            raise
        return self

    async def start(self, calls: Sequence[tuple[int, Request]], drop: Sequence[int] = ()) -> None:
        await self._remote.call("start", calls, drop, within_s=self._silence_s)

    async def collect(self, wait_s: float) -> PollResult:
        return await self._remote.call("collect", wait_s, within_s=wait_s + self._silence_s)

    async def publish(self, publication: Publication) -> str:
        """Packed once, however many samplers it goes to one after another."""
        return await self._remote.call("publish", publication, within_s=self._silence_s, shared=True)

    async def close(self) -> None:
        """End the worker, at once."""
        self._remote.kill()


__all__ = ["SamplerLink"]
