"""What comes of a sequence: one ``Completion``, whole, or as far as it got."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from ostinato.engine.postprocess import text_before
from ostinato.engine.sequences import Sequence
from ostinato.types import NO_EXPERT, Completion, Stop, Support

Decode = Callable[[Seq[int]], str]


def new_completion(
    sequence: Sequence, whole: np.ndarray, routes: np.ndarray | None, stop: Stop, decode: Decode | None
) -> Completion:
    """The answer of a sequence that has left its seat, or never had one.

    whole [L]: prompt and answer; routes [n, layers, K]: from ``routes_from`` on, as far as they are known.
    """
    tokens, prompt = whole[sequence.prompt_len :], sequence.prompt_len - sequence.request.routes_from
    if routes is not None:
        unknown = np.full((max(prompt + len(tokens) - len(routes), 0), *routes.shape[1:]), NO_EXPERT)
        routes = np.concatenate([routes, unknown.astype(routes.dtype)])
    logprobs, edges, versions = sequence.sampled or _NOTHING
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        edges=edges,
        versions=versions,
        stop=stop,
        text=text_of(tokens, sequence.request.sampling.stop_strings, stop, decode),
        support=Support.of(sequence.kept) if sequence.kept else None,
        experts=None if routes is None else routes[prompt:],
        prompt_experts=None if routes is None else routes[:prompt],
        drafted=sequence.drafted,
        accepted=sequence.accepted,
        passes=sequence.passes,
        cached_tokens=sequence.cached,
        recomputed=np.array(sequence.again, np.int32) if sequence.again else None,
        error="the logits are not finite" if stop is Stop.ERROR else "",
    )


def text_of(tokens: np.ndarray, strings: Seq[str], stop: Stop, decode: Decode | None) -> str:
    """Up to a stop string, and without a stop token."""
    if decode is None:
        return ""
    cut = text_before(decode, tokens, strings) if stop is Stop.STRING else None
    return cut if cut is not None else decode((tokens[:-1] if stop is Stop.EOS else tokens).tolist())


_NOTHING = (np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32))


__all__ = ["Decode", "new_completion", "text_of"]
