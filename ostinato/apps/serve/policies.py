"""The policies of a catalog, served: found by the key that asks, loaded when they are asked for, and kept in
the engine within a number of bytes."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ostinato.apps.serve.calls import ApiError, make_rate_error
from ostinato.catalog import Catalog, Version
from ostinato.engine.engine_thread import EngineThread, run_in_own_thread
from ostinato.engine.local import LocalEngine
from ostinato.engine.runner import ServedPolicy
from ostinato.launch.engine import AnyEngine
from ostinato.model.wire import NotFinite
from ostinato.residency import Full, Residency

WAIT_S = 30.0  # for room in memory
LOADS_AT_ONCE = 2  # of different owners; of an owner one
OUTCOMES = ("hit", "load", "evicted", "refused")
log = logging.getLogger(__name__)


class CatalogPolicies:
    """The policies of ``catalog`` in the engine of ``thread``. ``load`` reads a file, in a thread of its own;
    ``capacity_bytes``: of all adapters in memory, of which one key gets half at most."""

    def __init__(
        self,
        catalog: Catalog,
        thread: EngineThread[AnyEngine],
        load: Callable[[Path], ServedPolicy],
        capacity_bytes: int,
    ) -> None:
        self.catalog, self.counts = catalog, Counter[str]()
        self._thread, self._load, self._capacity = thread, load, capacity_bytes
        self._residency = Residency[str](capacity_bytes)
        self._locks: dict[str, asyncio.Lock] = {}  # by owner
        self._loading = asyncio.Semaphore(LOADS_AT_ONCE)
        self._freed = asyncio.Event()  # another one after each end of a pin
        self.refresh()

    def refresh(self) -> None:
        """Take over what other processes have changed in the catalog."""
        self.catalog.refresh()
        self._residency.share = self._capacity // (2 if self.catalog.has_owners else 1)

    def authenticate(self, key: str, server_key: str) -> str:
        """Return the owner of a key; "" for the server's own key, and for all where there are no keys. Raises
        ApiError 401 for any other key."""
        owner = self.catalog.find_owner(key)
        if owner is not None:
            return owner[0]
        is_open = not server_key and not self.catalog.has_owners
        if is_open or (server_key and hmac.compare_digest(key.encode(), server_key.encode())):
            return ""
        raise ApiError(
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    @asynccontextmanager
    async def hold(self, version: Version) -> AsyncIterator[None]:
        """Have a version in the engine, as ``policy_name`` calls it, while the context lasts. Raises
        ApiError: 429 while there is no room for it, 500 for a file that cannot be served."""
        name = policy_name(version)
        self.counts["hit"] += name in self._residency
        end = asyncio.get_running_loop().time() + WAIT_S
        while name not in self._residency:  # what was loaded may be evicted before this goes on
            freed, is_full = self._freed, False
            try:
                await asyncio.shield(asyncio.ensure_future(self._bring_in(version)))  # others may wait for it
            except Full:
                is_full = True
            if is_full:  # outside of the handler, whose traceback would hold the adapter that was loaded
                await self._wait_for_room(freed, version, end)
        self._residency.pin(name)
        try:
            yield
        finally:
            self._residency.unpin(name)
            if not self._residency.is_pinned(name):
                self._freed.set()
                self._freed = asyncio.Event()

    async def _wait_for_room(self, freed: asyncio.Event, version: Version, end: float) -> None:
        """Wait until a policy that answers has ended. Raises ApiError 429 at the time ``end`` of the loop."""
        try:
            async with asyncio.timeout_at(end):
                await freed.wait()
                await asyncio.sleep(0)  # where the time has come, it is over here although a pin has ended
        except TimeoutError:
            self.counts["refused"] += 1
            raise make_rate_error(
                f"there is no memory for {version.label} while other policies answer; try again later"
            ) from None

    async def _bring_in(self, version: Version) -> None:
        """Load a version and publish it, unless it is there, and withdraw what is evicted for it. An owner's
        loads wait for each other, so that its many do not hold up the one of another. Raises Full while there
        is no room, and ApiError 500 as ``hold``."""
        name = policy_name(version)
        async with self._locks.setdefault(version.owner, asyncio.Lock()), self._loading:
            if name in self._residency:
                return
            try:
                served = await run_in_own_thread(self._load, self.catalog.path(version))
            except (ValueError, OSError, NotFinite) as error:
                self.counts["refused"] += 1
                log.warning("%s of %r cannot be served: %s", version.label, version.owner, error)
                raise ApiError(
                    f"{version.label} cannot be served: its file is gone, damaged or of another base; "
                    "publish it again",
                    status=500,
                    kind="server_error",
                    code="policy_damaged",
                ) from error
            if served.num_bytes > self._residency.share:
                raise ApiError(
                    f"{version.label} takes {served.num_bytes} bytes, and a key has {self._residency.share} "
                    "here; serve with a larger --catalog-mb",
                    status=500,
                    kind="server_error",
                    code="policy_too_large",
                )
            evicted = self._residency.admit(name, served.num_bytes, version.owner)
            self.counts.update(load=1, evicted=len(evicted))

            def swap(engine: AnyEngine) -> None:
                assert isinstance(engine, LocalEngine)
                for other in evicted:
                    engine.withdraw(other)
                engine.publish(served, version.version, name)

            # A request that finds the name from now on reaches the engine after this call.
            try:
                await self._thread.call(swap)
            except BaseException:
                if not self._residency.is_pinned(name):
                    self._residency.drop(name)  # it is not in the engine
                raise


def policy_name(version: Version) -> str:
    """What the engine calls a version: its content never changes."""
    return f"catalog {version.owner}:{version.label}"
