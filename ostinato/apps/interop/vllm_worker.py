"""A policy changed under the running requests of vLLM, by a worker extension of it:

    vllm serve ... --worker-extension-cls ostinato.apps.interop.vllm_worker.Worker

vLLM 0.32 can load an adapter in the place of another (``load_inplace``), but every request keeps the folder
that it began with, and the flag with it: each pass loads its adapter from there anew. That costs 20 ms a
pass, and a request in flight goes on under the old adapter and takes all others of its batch with it,
whatever name is served. Here the worker's own adapter is replaced, once, while the requests go on
naming the one that they know.

It is called through ``/collective_rpc``; ``engine.vllm`` is the other side.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

FILES = ("adapter_config.json", "adapter_model.safetensors")


class Worker:
    """Mixed into vLLM's worker."""

    def ostinato_publish(self: Any, folder: str) -> str:
        """Serve the PEFT adapter in ``folder`` from the next pass on, in the place of the one that is served.
        The digest of what was read.

        Raises ValueError where not exactly one adapter is loaded, and what vLLM raises for one that does not
        fit; then the old one goes on.
        """
        from vllm.lora.request import LoRARequest

        known = sorted(self.list_loras())
        if len(known) != 1:
            raise ValueError(f"{len(known)} adapters are loaded, and only one can be replaced")
        self.add_lora(
            LoRARequest(lora_name="ostinato", lora_int_id=known[0], lora_path=folder, load_inplace=True)
        )
        return digest(Path(folder))

    def ostinato_device(self: Any) -> str:
        """What it computes on: "cpu", "cuda" ..."""
        return self.device.type


def digest(folder: Path) -> str:
    """16 hex digits of the files of an adapter."""
    hashed = blake2b(digest_size=8)
    for name in FILES:
        hashed.update((folder / name).read_bytes())
    return hashed.hexdigest()
