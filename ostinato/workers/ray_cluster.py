"""Ray: a cluster that is started here or joined, one actor per worker, a watchdog on its head node.

    Cluster.open(address, needs) -> places reserved -> .remote(name, factory, arguments) -> RayRemote
                                         |
                                    Watch: checks that the head answers

A worker is one async actor of ``host.Host``. Ray restarts nothing by itself: the caller of a worker decides
what becomes of its work, and starts a new one. Actors and reservations die with this process. Ray aborts a
process that cannot reach its head for a minute; the watch notices sooner, so that a run can save and say why.
If Ray's daemon on this host is lost, Ray ends this process at once without a report; ``witness`` prints one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ostinato.workers.host import BUILD, Host, Place, own_place
from ostinato.workers.process import witness
from ostinato.workers.remote import (
    SLICE_S,
    Patience,
    WorkerFault,
    WorkerKind,
    WorkerLost,
    seal,
    unpack_outcome,
)

HEAD_S = 15  # seconds without an answer of the head, after which it is lost; Ray itself aborts after 60
STORE_BYTES = 1 << 29  # of shared memory for messages, on a cluster that we start; the rest spills to disk
# For a Ray that we start: no prestarted workers, whose environment would not fit, and no niceness.
LEAN_CONFIG = {
    "prestart_worker_first_driver": False,
    "worker_niceness": 0,
}
MAX_CALLS = 256  # concurrent calls to one worker
CLOSE_S = 5.0  # limit for the head to release workers and places
REACH_S = 5.0  # limit for an address to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The resources that a worker needs."""

    name: str
    cpus: int = 1
    gpus: float = 0.0
    nice: int = 0


class Cluster:
    """Reserved resources for each of ``needs``. Made by ``open``, a context at whose end all workers end."""

    def __init__(self, needs: Sequence[Need], *, silence_s: float, folder: Path | None) -> None:
        self._needs = {need.name: need for need in needs}
        self._places = {need.name: place for place, need in enumerate(needs)}
        self.silence_s, self._folder = silence_s, folder
        self._group: Any = None
        self._remotes: dict[str, RayRemote] = {}
        self._last_shared: tuple[Any, Any] = (None, None)  # the last shared value, and its reference
        self._watch = Watch()

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        address: str,
        needs: Sequence[Need],
        *,
        start_s: float,
        silence_s: float,
        last_words: str = "this process was ended",
    ) -> Iterator[Cluster]:
        """A context with a cluster in which each worker has its resources. It uses the Ray that this process
        has joined before, else joins the one at ``address`` or, without an address, starts one; at the end
        the workers end, and Ray is left unless it was joined before. ``last_words`` is printed if the process
        ends within the context.

        Raises ValueError if no Ray answers or can be started, or if the workers do not fit within ``start_s``
        seconds.
        """
        is_joined = ray.is_initialized()
        folder = None if is_joined or address else _make_folder()
        with witness(last_words, folder):
            if not is_joined:
                _connect(address, needs, folder)
            cluster = cls(needs, silence_s=silence_s, folder=folder)
            try:
                cluster._reserve(start_s)
                yield cluster
            finally:
                cluster.close(leave=not is_joined)

    def _reserve(self, start_s: float) -> None:
        """Reserve a bundle for each worker, so that its replacement finds the resources free. Raises
        ValueError if they do not fit within ``start_s`` seconds."""
        bundles = [
            {"CPU": need.cpus} | ({"GPU": need.gpus} if need.gpus else {}) for need in self._needs.values()
        ]
        self._group = placement_group(bundles, strategy="PACK" if self._folder else "SPREAD")
        if not self._group.wait(start_s):
            available = ray.cluster_resources()
            requested = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
            needed = ", ".join(
                f"{requested[kind]:g} of {available.get(kind, 0):g} {kind}s"
                for kind in requested
                if requested[kind]
            )
            raise ValueError(
                f"the workers of [cluster] found no place in cluster.start_s={start_s:g} s: they need "
                f"{needed} that Ray has; lower cluster.samplers, cpus_per_worker or gpus_*, or add nodes"
            )

    def remote(self, name: str, factory: str, arguments: Mapping[str, Any], *, start_s: float) -> RayRemote:
        """Start the worker ``name`` (one of ``needs``), which begins to build its object; an earlier worker
        of that name is killed. Returns at once. Raises WorkerLost if the head is lost."""
        self.check()
        if (earlier_remote := self._remotes.get(name)) is not None:
            earlier_remote.kill()
        need, place = self._needs[name], self._places[name]
        actor = ray.remote(Host).options(
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            max_restarts=0,
            max_concurrency=MAX_CALLS,
            runtime_env={"env_vars": _make_environment(need.cpus, local=self._folder is not None)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, place),
        )
        handle = actor.remote(name, need.nice)
        self._remotes[name] = remote = RayRemote(self, name, handle, start_s)
        remote.build(factory, arguments)
        return remote

    def place(self, name: str) -> Place | None:
        """The place of a worker; None until it has been built."""
        remote = self._remotes.get(name)
        return None if remote is None else remote.place

    def check(self) -> None:
        """Raises a final WorkerLost once the head has stopped answering."""
        if reason := self._watch.lost:
            raise WorkerLost(WorkerKind.CLUSTER, reason, final=True)

    def shelf(self, value: Any) -> Any:
        """A reference to the sealed ``value``. The last value is kept, so workers that get it in succession
        share one."""
        if self._last_shared[0] is not value:
            self._last_shared = (value, ray.put(seal((value,))))
        return self._last_shared[1]

    def close(self, *, leave: bool) -> None:
        """Stop the watch, end the workers, release their resources, and remove the folder of a Ray started
        here. ``leave``: disconnect from Ray, which ends a Ray started here."""
        self._watch.stop()
        self._last_shared = (None, None)
        at_most(CLOSE_S, self._release)
        if leave:
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _release(self) -> None:
        """Kill all workers and remove the reservation."""
        for remote in self._remotes.values():
            remote.kill()
        if self._group is not None:
            remove_placement_group(self._group)


def at_most(seconds: float, work: Callable[[], None]) -> None:
    """Do ``work`` in a thread, but wait at most ``seconds``: a call to a dead head may never return. The
    thread then goes on, and its errors are not raised here."""
    thread = threading.Thread(target=work, name="ray-at-most", daemon=True)
    thread.start()
    thread.join(seconds)


class RayRemote:
    """``remote.Remote`` over an actor of ``Host``."""

    def __init__(self, cluster: Cluster, name: str, handle: Any, start_s: float) -> None:
        self.name = name
        self._cluster, self._handle, self._start_s = cluster, handle, start_s
        self.place: Place | None = None  # once it is built
        self._number, self._end_reason, self._build = 0, "", None

    def build(self, factory: str, arguments: Mapping[str, Any]) -> None:
        self._build = self._send(BUILD, seal((factory, dict(arguments), os.getcwd())))

    def _send(self, method: str, payload: Any) -> Any:
        """Call ``method`` of the actor under the next number; returns a reference. Raises WorkerLost for a
        worker that was ended or lost, and for a lost cluster."""
        if self._end_reason:
            raise WorkerLost(WorkerKind.of(self.name), self._end_reason, self.name)
        self._cluster.check()  # workers answer for a while after the head is lost
        number, self._number = self._number, self._number + 1
        with self._translate_errors(method):
            return self._handle.call.remote(number, method, payload)

    async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any:
        with self._translate_errors(method):
            payload = self._cluster.shelf(*arguments) if shared else seal(arguments)
        reference = self._send(method, payload)
        if self.place is None:
            self._set_place(unpack_outcome(await self._await_answer(self._build, BUILD, self._start_s)))
        return unpack_outcome(await self._await_answer(reference, method, within_s))

    def _set_place(self, place: Place) -> None:
        """Set the place of the built worker. Raises WorkerFault for another version of ostinato."""
        if place.ostinato != (version := own_place().ostinato):
            raise WorkerFault(
                f"{self.name} on {place.host} has ostinato {place.ostinato} and this process {version}; "
                "install one version on all hosts"
            )
        self.place = place

    async def _await_answer(self, reference: Any, method: str, within_s: float) -> bytes:
        """The result of a call. Raises WorkerLost if the worker or the cluster stops answering."""
        future, patience = asyncio.wrap_future(reference.future()), self._new_patience(method, within_s)
        try:
            while not (await asyncio.wait({future}, timeout=SLICE_S))[0]:
                self._cluster.check()
                patience.wear()
            with self._translate_errors(method):
                return future.result()
        finally:
            future.cancel()

    def wait(self, method: str, *arguments: Any, within_s: float) -> Any:
        reference = self._send(method, seal(arguments))
        if self.place is None:
            self._set_place(unpack_outcome(self._get_answer(self._build, BUILD, self._start_s)))
        return unpack_outcome(self._get_answer(reference, method, within_s))

    def _get_answer(self, reference: Any, method: str, within_s: float) -> bytes:
        """``_await_answer``, blocking."""
        patience = self._new_patience(method, within_s)
        while True:
            with self._translate_errors(method), contextlib.suppress(exceptions.GetTimeoutError):
                return ray.get(reference, timeout=SLICE_S)
            self._cluster.check()
            patience.wear()

    def _new_patience(self, method: str, within_s: float) -> Patience:
        """The time limits of a call; a worker that is being built may be silent, since imports keep it
        busy."""
        silence_s = math.inf if method == BUILD else self._cluster.silence_s
        signs = lambda: self._handle.alive.remote().future()  # noqa: E731
        return Patience(signs, self.name, f"gave no answer to {method}", within_s, silence_s)

    @contextlib.contextmanager
    def _translate_errors(self, method: str) -> Iterator[None]:
        """Replace Ray's errors by a WorkerLost that names worker and ``method``; timeouts pass."""
        try:
            yield
        except exceptions.GetTimeoutError:
            raise
        except exceptions.RayError as error:
            self._cluster.check()
            cause = f"was lost while it did {method}: {describe_error(error)}"
            raise WorkerLost(WorkerKind.of(self.name), cause, self.name) from error

    def kill(self) -> None:
        self._end_reason = self._end_reason or "was ended"
        with contextlib.suppress(exceptions.RayError, ValueError):
            ray.kill(self._handle)


class Watch:
    """Checks every ``every_s`` seconds, in a thread, that the cluster's head answers; ``lost`` is the reason
    once it does not. It stops when this process has left Ray, as a further query would start another one.

    Only seconds of waiting count, so that a machine's sleep does not make the head seem lost."""

    def __init__(self, every_s: float = 2.0, head_s: int = HEAD_S) -> None:
        self.lost = ""
        self._node_id = ray.get_runtime_context().get_node_id()
        self._stop_event = threading.Event()
        threading.Thread(target=self._watch, args=(every_s, head_s), name="watch-ray", daemon=True).start()

    def stop(self) -> None:
        self._stop_event.set()

    def _watch(self, every_s: float, head_s: int) -> None:
        silent_s, num_unanswered = 0.0, 0  # queries in a row without an answer
        while silent_s < head_s:
            answer_event = threading.Event()
            at_most(every_s, lambda answer_event=answer_event: self._query_head(answer_event))
            num_unanswered = 0 if answer_event.is_set() else num_unanswered + 1
            silent_s = num_unanswered * 2 * every_s
            if self._stop_event.wait(every_s) or not ray.is_initialized():
                return
        self.lost = f"the head of the Ray cluster, or its daemon here, has not answered for {silent_s:.0f} s"

    def _query_head(self, answer_event: threading.Event) -> None:
        with contextlib.suppress(exceptions.RayError, OSError, RuntimeError, ValueError):
            if next((node["Alive"] for node in ray.nodes() if node["NodeID"] == self._node_id), True):
                answer_event.set()


def _connect(address: str, needs: Sequence[Need], folder: Path | None) -> None:
    """Join the Ray at ``address``, or start one in ``folder`` if that is given, with a private token file.
    Ray replaces the handler of SIGTERM, and usage statistics are turned off unless the user set them; the
    handler is put back. Raises ValueError if it fails; ``folder`` is removed then."""
    if address not in ("", "auto"):
        check_reachable(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    try:
        if folder is None:
            ray.init(address=address, **quiet)
        else:
            ray.init(
                num_cpus=sum(need.cpus for need in needs),  # what the workers need, whatever the machine has
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                _temp_dir=str(folder),
                _system_config=LEAN_CONFIG,
                **quiet,
            )
            keep_token(Path.home() / ".ray" / "auth_token")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            raise ValueError(f"no Ray could be started on this machine: {describe_error(error)}") from error
        if address == "auto":
            raise ValueError(_explain_unreachable(address, describe_error(error))) from error
        raise ValueError(
            f"cluster.address is {address!r}, where a server answers, but no Ray that this process may join "
            f"({describe_error(error)}); it has to be of this version ({ray.__version__}), and where it "
            "requires a token (RAY_AUTH_MODE=token) this process needs both"
        ) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)


def keep_token(file: Path) -> None:
    """Make the file of Ray's token private to this user, if it can be done. Ray listens on all interfaces,
    accepts anyone with the token, and writes it to a file that all users of the host can read."""
    with contextlib.suppress(OSError):
        file.chmod(0o600)


def check_reachable(address: str) -> None:
    """Raise ValueError for an address not of the form "host:port", or if no server answers there; Ray itself
    would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ValueError(
            f'cluster.address is {address!r}; give "auto", or host:port of the head, as "ray start" says'
        )
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise ValueError(_explain_unreachable(address, str(error))) from error


def _explain_unreachable(address: str, why: str) -> str:
    return (
        f'cluster.address is {address!r}, where no Ray answers ({why}); start one with "ray start --head", '
        "or leave the address empty to have one started here"
    )


def _make_folder() -> Path:
    """A new folder for logs and sockets, whose paths may have 107 bytes at most."""
    root = "/tmp" if os.access("/tmp", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="ostinato-ray-", dir=root))


def _make_environment(cpus: int, *, local: bool) -> dict[str, str]:
    """Environment variables for a worker's libraries: threads of OpenMP, and for a local Ray Python's
    path."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["OMP_NUM_THREADS"] = str(cpus)
    if local:
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return environment


def describe_error(error: BaseException) -> str:
    """Ray's message without its general advice; for a dead actor, the end of its process."""
    text = " ".join(str(error).split())
    if "connection error code 2" in text:
        return "its process ended, as one does that is killed or out of memory"
    for opening in ("The actor is dead because ", "Worker exit detail: "):
        text = text.rpartition(opening)[2]
    sentence = re.split(r"\. (?:Some common|There are some|To troubleshoot)", text)[0]
    return f"{type(error).__name__}: {sentence.rstrip('.')[:300]}"
