"""Change a policy under the running requests of vLLM, by an extension of its worker:

    vllm serve ... --worker-extension-cls ostinato.apps.interop.vllm_worker.Worker

vLLM 0.32 can load an adapter in the place of another (``load_inplace``), but every request keeps its first
folder and this flag. So each pass loads the adapter from that folder anew, which costs 20 ms. A request in
flight goes on under the old adapter, and so do all others of its batch, whatever name they ask for. Here the
worker's own adapter is replaced once, and the requests keep their name.

``engine.vllm`` calls it through ``/collective_rpc``.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

FILES = ("adapter_config.json", "adapter_model.safetensors")


class Worker:
    """Methods that are mixed into vLLM's worker."""

    def ostinato_publish(self: Any, folder: str) -> str:
        """Serve the PEFT adapter in ``folder`` from the next pass on, in the place of the current adapter.
        Return the digest of its files.

        Raises ValueError unless exactly one adapter is loaded, and vLLM's own error for an adapter that does
        not fit. After an error the old adapter stays.
        """
        from vllm.lora.request import LoRARequest

        adapter_ids = sorted(self.list_loras())
        if len(adapter_ids) != 1:
            raise ValueError(f"{len(adapter_ids)} adapters are loaded, and only one can be replaced")
        self.add_lora(
            LoRARequest(lora_name="ostinato", lora_int_id=adapter_ids[0], lora_path=folder, load_inplace=True)
        )
        return hash_adapter(Path(folder))

    def ostinato_device(self: Any) -> str:
        """The type of the worker's device: "cpu", "cuda" ..."""
        return self.device.type


def hash_adapter(folder: Path) -> str:
    """Hash the two files of an adapter. Return 16 hex digits."""
    hasher = blake2b(digest_size=8)
    for name in FILES:
        hasher.update((folder / name).read_bytes())
    return hasher.hexdigest()
