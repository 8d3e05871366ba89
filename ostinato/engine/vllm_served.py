"""What a vLLM server serves: how a policy is installed, the labels that prove it, and its restarts.

install: pause (KV kept) -> the adapter replaced, its digest compared -> labelled -> resume -> its label read
lost -> started anew, at most so many times in a row -> the policy installed -> a new epoch
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.engine.vllm_server import Reply, Server, Unreachable, call, vllm_lost, vllm_wrong
from ostinato.model.lora import Adapters
from ostinato.workers.lost import Restarts, WorkerLost

logger = logging.getLogger(__name__)
LORA = "ostinato"  # the name of the adapter there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """What was published."""

    version: int
    fingerprint: str = ""  # "": the base
    folder: Path | None = None  # of its adapter
    digest: str = ""  # of the files in it
    adapters: Adapters | None = None  # a copy

    @property
    def label(self) -> str:
        return f"{self.version}:{self.fingerprint or 'base'}"

    def name(self, base: str) -> str:
        """Name of the model; ``base`` is that without an adapter."""
        return base if self.folder is None else LORA


class Served:
    """What ``server`` serves; each part of its answers may take up to ``silence_s`` seconds."""

    def __init__(self, server: Server, silence_s: float) -> None:
        self.label = ""  # that the server gave last
        self.signs = 0  # of life: answers, and beats while requests run
        self._server, self._silence_s = server, silence_s
        self._slot = -1  # the version of the loaded adapter
        self._versions: dict[str, int] = {}  # of the loaded adapter, by the label at that time

    def install(self, policy: Policy) -> None:
        """Have the server serve it. Raises WorkerLost and Unreachable, and the server stays paused: an
        adapter that was replaced, but not labelled, would sample under the name of the one before."""
        self.must("POST", "/pause?mode=keep&clear_cache=false")
        if policy.folder is not None:
            self._load(policy, policy.folder)
            self._slot = policy.version
        self._versions[policy.label] = self._slot
        self.must("POST", "/update_weight_version", {"new_version": policy.label})
        self.must("POST", "/resume")
        self.beat()
        if self.label != policy.label:
            raise vllm_wrong(f"vLLM serves policy {self.label!r} after {policy.label!r} was published")

    def _load(self, policy: Policy, folder: Path) -> None:
        """Load the adapter into its slot, which the first one creates."""
        place, refused = str(folder.absolute()), f"vLLM does not take the adapter of policy {policy.label}"
        if LORA not in {card["id"] for card in self.must("GET", "/v1/models")["data"]}:
            reply = self.ask("POST", "/v1/load_lora_adapter", {"lora_name": LORA, "lora_path": place})
            if reply.status != 200:
                self.must("POST", "/resume")  # nothing was replaced
                raise vllm_wrong(f"{refused}: {reply.error}")
        reply = self.ask("POST", "/collective_rpc", {"method": "ostinato_publish", "args": [place]})
        if reply.status != 200:
            raise vllm_wrong(f"{refused}: {reply.error}")
        if read := {*reply.body["results"]} - {policy.digest}:
            raise vllm_wrong(f"vLLM read {sorted(read)} in {folder}, where {policy.digest} was written")

    def versions(self, policy: Policy, choice: dict[str, Any]) -> np.ndarray:
        """[T] int32, by the labels of the tokens. Raises Unreachable where a label was not published, or is
        older than ``policy``, which was to be sampled from."""
        spans, count = choice["weight_versions"] or [], len(choice["token_ids"])
        versions = np.full(count, -1, np.int32)
        for span in spans:
            served = self._version(span["version"])
            versions[span["start"] : span["end"]] = served if policy.folder is not None else policy.version
        if count and versions.min() < policy.version:
            raise Unreachable(
                f"vLLM answered as policy {versions.min()} where {policy.version} was requested"
            )
        return versions

    def _version(self, label: str) -> int:
        if label not in self._versions:
            raise Unreachable(f"vLLM serves policy {label!r}, which was not published")
        self.label = label
        return self._versions[label]

    def beat(self) -> None:
        """A sign of life; raises Unreachable where there is none. The engine core answers this between two
        passes. ``/health`` reports a healthy server for a while after it died."""
        reply = self._call("GET", "/weight_info")
        if reply.status != 200:
            raise Unreachable(f"vLLM gave no sign of life but {reply.error}")
        self._version(reply.body["weight_version"])
        self.signs += 1

    def must(self, method: str, path: str, body: Any = None) -> Any:
        """The body of the reply. Raises Unreachable where a request is refused that always works."""
        if (reply := self.ask(method, path, body)).status != 200:
            raise Unreachable(f"{method} {path}: {reply.error}")
        return reply.body

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """The reply. Raises Unreachable where there is none, or only a 5xx of a dying server."""
        reply = self._call(method, path, body)
        if reply.status >= 500:
            self.beat()
        return reply

    def _call(self, method: str, path: str, body: Any = None) -> Reply:
        server = self._server
        return call(server.address, method, path, body, key=server.key, timeout_s=self._silence_s)


@dataclass(kw_only=True, eq=False)
class Lives:
    """The lives of ``server``, one after the other: ``start`` begins one, ``install`` gives it the policy.
    ``counters`` are updated."""

    server: Server
    start: Callable[[], None]
    install: Callable[[Policy], None]
    restarts: Restarts
    counters: Counter[str]
    epoch: int = 0  # the number of earlier lives

    def __post_init__(self) -> None:
        self._lock = threading.RLock()  # of the server's life and of what it serves
        self._policy, self._closed = Policy(version=0), False

    def publish(self, policy: Policy) -> None:
        """Install ``policy`` on the server, restarted where it is lost. Raises WorkerLost."""
        with self._lock:
            try:
                self.install(policy)
            except Unreachable as lost:
                self._begin(str(lost), policy)
            self._policy = policy

    def recover(self, epoch: int, why: str) -> None:
        """Restart the server that was lost in ``epoch``. Of the callers that find it lost, one does so.
        Raises WorkerLost."""
        with self._lock:
            if epoch == self.epoch:
                self._begin(why, self._policy)

    def _begin(self, why: str, policy: Policy) -> None:
        while True:
            self.restarts.in_a_row += 1
            lost, most = self.restarts.in_a_row, self.restarts.most
            if self.restarts.spent or self._closed:
                raise vllm_lost(f"vLLM was lost {lost} times in a row: {why}; {self.server.why()}")
            logger.warning(f"vLLM was lost and is started anew ({lost} of {most}): {why}")
            try:
                self.start()
                self.install(policy)
            except (Unreachable, WorkerLost) as error:
                if isinstance(error, WorkerLost) and error.final:
                    raise
                why = str(error)
                continue
            self.epoch += 1
            self.counters["workers/restarts"] += 1
            return

    def close(self) -> None:
        """End the server, if it is ours."""
        self._closed = True
        self.server.close()
        with self._lock:  # a restart that was under way has ended, and what it had started ends too
            self.server.close()
