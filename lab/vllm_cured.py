"""vLLM's own draft methods on CPU, cured: ``worker_extension_cls="lab.vllm_cured.Worker"``.

vLLM imports a worker extension when its worker begins, the one moment at which its kernels can be replaced:
so here is a module that does something when it is imported, and nothing else.
"""

from __future__ import annotations

from ostinato.apps.interop.vllm_drafter import correct_verification

correct_verification()


class Worker:
    """Adds nothing to vLLM's worker."""
