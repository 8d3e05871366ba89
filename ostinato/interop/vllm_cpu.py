"""vLLM on CPU verifies drafts with uninitialised memory for a temperature; here is the cure.

Without Triton, vLLM 0.32 replaces its kernels by C++ ones. The one that spreads temperature, top-k and top-p
from requests to their draft tokens writes into a copy that is dropped, so every draft method, vLLM's own
included, emits noise at any temperature but 0 (vllm issue 55005). vLLM has a registry for such replacements;
what is registered there is put right, if it is wrong.

``HistoryProposer`` does it by itself.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("vllm.ostinato")  # below vLLM's logger, which is the one that has a handler there


def cure() -> None:
    """In a worker of vLLM on CPU, before it serves: put the verification of drafts right.

    Raises ValueError if it stays wrong.
    """
    if _is_right():
        return
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})
    if not _is_right():
        raise ValueError(
            "this vLLM loses the temperature of drafted tokens (vllm issue 55005); use another version"
        )
    _log.warning("vllm issue 55005: drafted tokens get their temperature from ostinato.interop.vllm_cpu now")


def _is_right() -> bool:
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    given, ends = torch.tensor([0.75, 0.0, 1.5]), torch.tensor([1, 3, 4], dtype=torch.int32)
    return expand_batch_to_tokens(given, ends, 4, replace_from=0, replace_to=1).tolist() == [0.75, 1, 1, 1.5]


def _expand(
    output: Any, values: Any, ends: Any, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int = 0
) -> None:
    """output[t] = values[request of token t], ``replace_from`` replaced; ends: [requests] of their tokens."""
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


__all__ = ["cure"]
