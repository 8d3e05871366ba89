"""What a vLLM server serves: how a policy is installed, and the labels that prove it.

install: pause (KV kept) -> the adapter replaced, its digest compared -> labelled -> resume -> its label read
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato.engine.vllm_adapters import write_adapters
from ostinato.engine.vllm_server import Reply, Server, Unreachable, call, vllm_lost
from ostinato.model.lora import Adapters
from ostinato.model.peft_foreign import CONFIG, TENSORS
from ostinato.model.wire import check_finite, fingerprint

LORA = "ostinato"  # the name of the adapter there


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What was published."""

    version: int
    fingerprint: str = ""  # "": the base
    folder: Path | None = None  # of its adapter
    digest: str = ""  # of the files in it

    @property
    def label(self) -> str:
        return f"{self.version}:{self.fingerprint or 'base'}"

    def name(self, base: str) -> str:
        """Name of the model; ``base`` is that without an adapter."""
        return base if self.folder is None else LORA


def write_policy(adapters: Adapters | None, version: int, parent: Path, dtype: torch.dtype) -> Policy:
    """The policy of ``adapters``, checked and written to a folder of its own, in the ``dtype`` of the server.
    Raises NotFinite."""
    if adapters is None:
        return Policy(version=version)
    check_finite(adapters)
    mark = fingerprint(adapters)
    folder = parent / f"policy-{version}-{mark}"
    folder.mkdir(parents=True, exist_ok=True)
    write_adapters(adapters, folder, dtype)
    return Policy(version=version, fingerprint=mark, folder=folder, digest=_digest(folder))


def _digest(folder: Path) -> str:
    """As the worker computes it (``interop.vllm_worker.digest``)."""
    hashed = blake2b(digest_size=8)
    for name in (CONFIG, TENSORS):
        hashed.update((folder / name).read_bytes())
    return hashed.hexdigest()


class PolicyClient:
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
            raise vllm_lost(f"vLLM serves policy {self.label!r} after {policy.label!r} was published")

    def _load(self, policy: Policy, folder: Path) -> None:
        """Load the adapter into its slot, which the first one creates."""
        place, refused = str(folder.absolute()), f"vLLM does not take the adapter of policy {policy.label}"
        if LORA not in {card["id"] for card in self.must("GET", "/v1/models")["data"]}:
            reply = self.ask("POST", "/v1/load_lora_adapter", {"lora_name": LORA, "lora_path": place})
            if reply.status != 200:
                raise vllm_lost(f"{refused}: {reply.error}")
        reply = self.ask("POST", "/collective_rpc", {"method": "ostinato_publish", "args": [place]})
        if reply.status != 200:
            raise vllm_lost(f"{refused}: {reply.error}")
        if read := {*reply.body["results"]} - {policy.digest}:
            raise vllm_lost(f"vLLM read {sorted(read)} in {folder}, where {policy.digest} was written")

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
