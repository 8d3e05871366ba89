"""Installs policies on a vLLM server, and reads the labels that prove which policy is served.

install: pause (KV kept) -> replace the adapter, compare its digest -> label it -> resume -> read the label
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato.engine.vllm_adapters import write_adapters
from ostinato.engine.vllm_server import Reply, Server, Unreachable, call, make_vllm_lost
from ostinato.model.lora import Adapters
from ostinato.model.peft_foreign import CONFIG, TENSORS
from ostinato.model.wire import check_finite, fingerprint_adapters

LORA = "ostinato"  # the name of the adapter on the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A published policy."""

    version: int
    fingerprint: str = ""  # "": the base
    folder: Path | None = None  # of its adapter
    digest: str = ""  # of the files in it

    @property
    def label(self) -> str:
        return f"{self.version}:{self.fingerprint or 'base'}"

    def name(self, base: str) -> str:
        """Return the name of the model; ``base`` is its name without an adapter."""
        return base if self.folder is None else LORA


def write_policy(adapters: Adapters | None, version: int, parent: Path, dtype: torch.dtype) -> Policy:
    """Check ``adapters``, write them to a folder of ``parent`` in the ``dtype`` of the server, and return
    their policy. For the base nothing is written. Raises NotFinite."""
    if adapters is None:
        return Policy(version=version)
    check_finite(adapters)
    adapters_fingerprint = fingerprint_adapters(adapters)
    folder = parent / f"policy-{version}-{adapters_fingerprint}"
    folder.mkdir(parents=True, exist_ok=True)
    write_adapters(adapters, folder, dtype)
    return Policy(
        version=version, fingerprint=adapters_fingerprint, folder=folder, digest=_compute_digest(folder)
    )


def _compute_digest(folder: Path) -> str:
    """Compute the digest as the worker does (``interop.vllm_worker.digest``)."""
    hasher = blake2b(digest_size=8)
    for name in (CONFIG, TENSORS):
        hasher.update((folder / name).read_bytes())
    return hasher.hexdigest()


class PolicyClient:
    """A client for the policy of ``server``. Each part of its answers may take ``silence_s`` seconds. Every
    answer that has a label updates ``label``."""

    def __init__(self, server: Server, silence_s: float) -> None:
        self.label = ""  # the latest that the server has reported
        self.signs = 0  # of life: answers, and beats while requests run
        self._server, self._silence_s = server, silence_s
        self._loaded_version = -1  # the version of the loaded adapter
        self._versions: dict[str, int] = {}  # versions of the loaded adapter, by label

    def install(self, policy: Policy) -> None:
        """Make the server serve ``policy``. Raises WorkerLost and Unreachable, and the server stays paused: a
        new adapter without its label would sample under the label of the old adapter."""
        self.require_reply("POST", "/pause?mode=keep&clear_cache=false")
        if policy.folder is not None:
            self._load(policy, policy.folder)
            self._loaded_version = policy.version
        self._versions[policy.label] = self._loaded_version
        self.require_reply("POST", "/update_weight_version", {"new_version": policy.label})
        self.require_reply("POST", "/resume")
        self.beat()
        if self.label != policy.label:
            raise make_vllm_lost(f"vLLM serves policy {self.label!r} after {policy.label!r} was published")

    def _load(self, policy: Policy, folder: Path) -> None:
        """Load the adapter into the slot ``LORA``, which the first load creates."""
        path, refusal = str(folder.absolute()), f"vLLM does not take the adapter of policy {policy.label}"
        if LORA not in {card["id"] for card in self.require_reply("GET", "/v1/models")["data"]}:
            reply = self.ask("POST", "/v1/load_lora_adapter", {"lora_name": LORA, "lora_path": path})
            if reply.status != 200:
                raise make_vllm_lost(f"{refusal}: {reply.error}")
        reply = self.ask("POST", "/collective_rpc", {"method": "ostinato_publish", "args": [path]})
        if reply.status != 200:
            raise make_vllm_lost(f"{refusal}: {reply.error}")
        if wrong_digests := {*reply.body["results"]} - {policy.digest}:
            raise make_vllm_lost(
                f"vLLM read {sorted(wrong_digests)} in {folder}, where {policy.digest} was written"
            )

    def versions(self, policy: Policy, choice: dict[str, Any]) -> np.ndarray:
        """Return the versions [T] int32 of the tokens, by their labels; under the base they are its own.
        Raises Unreachable if a label was not published, if a token has none, or if one is older than
        ``policy``, under which the request was sent."""
        spans, count = choice["weight_versions"] or [], len(choice["token_ids"])
        versions = np.full(count, -1, np.int32)
        for span in spans:
            label_version = self._look_up_version(span["version"])
            versions[span["start"] : span["end"]] = (
                label_version if policy.folder is not None else policy.version
            )
        if count and versions.min() < policy.version:
            raise Unreachable(
                f"vLLM answered as policy {versions.min()} where {policy.version} was requested"
            )
        return versions

    def _look_up_version(self, label: str) -> int:
        """Return the version of a published label, and store that as the latest. Raises Unreachable."""
        if label not in self._versions:
            raise Unreachable(f"vLLM serves policy {label!r}, which was not published")
        self.label = label
        return self._versions[label]

    def beat(self) -> None:
        """Wait for a sign of life, count it, and store the label that the server reports. Raises Unreachable
        if there is none, or the label was not published. The engine core answers this request between two
        passes; ``/health`` still reports a healthy server for a while after it died."""
        reply = self._call("GET", "/weight_info")
        if reply.status != 200:
            raise Unreachable(f"vLLM gave no sign of life but {reply.error}")
        self._look_up_version(reply.body["weight_version"])
        self.signs += 1

    def require_reply(self, method: str, path: str, body: Any = None) -> Any:
        """Return the body of a reply that a living server always gives. Raises Unreachable for any other
        reply."""
        if (reply := self.ask(method, path, body)).status != 200:
            raise Unreachable(f"{method} {path}: {reply.error}")
        return reply.body

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """Return the reply. After a 5xx it asks for a sign of life first. Raises Unreachable if there is
        none."""
        reply = self._call(method, path, body)
        if reply.status >= 500:
            self.beat()
        return reply

    def _call(self, method: str, path: str, body: Any = None) -> Reply:
        server = self._server
        return call(server.address, method, path, body, key=server.key, timeout_s=self._silence_s)
