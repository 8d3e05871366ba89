"""Checks requests and makes sequences from them, and completions from sequences, finished or cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ostinato.algo.noise import key
from ostinato.engine.cache import BLOCK
from ostinato.engine.postprocess import cut_at_string
from ostinato.engine.sequences import Sequence
from ostinato.types import NO_EXPERT, Completion, Emitted, Request, Stop, Support

Results = asyncio.Queue[tuple[int, Completion] | BaseException]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine for requests."""

    context: int  # tokens in a sequence
    vocab_size: int
    blocks: int  # of the KV cache
    has_text: bool  # token ids can be decoded
    policies: Mapping[str, int]  # numbers by name


def new_sequence(
    request: Request,
    limits: Limits,
    *,
    index: int = 0,
    results: Results,
    on_tokens: Callable[[int, Emitted], None] | None = None,
) -> Sequence:
    """Make a waiting sequence from a request. Raises ValueError as ``check_request`` does."""
    check_request(request, limits)
    return Sequence(
        index=index,
        request=request,
        results=results,
        on_tokens=on_tokens,
        address=key(request.seed),
        limit=min(len(request.tokens) + request.sampling.max_tokens, limits.context),
        policy=limits.policies[request.policy],
        text=np.array(request.tokens, np.int32),
    )


async def await_result(results: Results) -> tuple[int, Completion]:
    """Wait for the next result. Raises an error that the engine has put in its place."""
    result = await results.get()
    if isinstance(result, BaseException):
        raise result
    return result


def check_request(request: Request, limits: Limits) -> None:
    """Raises ValueError for a request that can never be answered: an unknown policy, a prompt that is empty,
    too long or has tokens outside of the vocabulary, ``routes_from`` outside of the prompt, more tokens than
    the KV cache holds, or stop strings without a tokenizer."""
    sampling, length = request.sampling, len(request.tokens)
    if request.policy not in limits.policies:
        names = ", ".join(repr(name) for name in sorted(limits.policies))
        raise ValueError(f"a request names the policy {request.policy!r}; there are {names}")
    if length == 0:
        raise ValueError("a request has no tokens; give at least one, for example the bos token")
    for token in (int(np.min(request.tokens)), int(np.max(request.tokens))):
        if not 0 <= token < limits.vocab_size:
            raise ValueError(
                f"a prompt has the token {token}, but the model's are 0 to {limits.vocab_size - 1}"
            )
    if not 0 <= request.routes_from < length:
        raise ValueError(
            f"routes_from is {request.routes_from}; a prompt of {length} tokens allows 0 to {length - 1}"
        )
    if length >= limits.context:
        raise ValueError(f"a prompt has {length} tokens and the context {limits.context}; shorten the prompt")
    longest = min(length + sampling.max_tokens, limits.context)
    if (longest + BLOCK - 1) // BLOCK > limits.blocks:
        raise ValueError(
            f"a request of up to {longest} tokens does not fit the KV cache of "
            f"{limits.blocks * BLOCK}; raise engine.kv_memory_mb or lower max_tokens"
        )
    if sampling.stop_strings and not limits.has_text:
        raise ValueError("sampling.stop_strings need a tokenizer; give the engine decode=")


Decode = Callable[[Seq[int]], str]


def new_completion(
    sequence: Sequence, text: np.ndarray, routes: np.ndarray | None, stop: Stop, decode: Decode | None
) -> Completion:
    """Make the completion of a sequence that has left its slot, or never had one.

    text [L]: prompt and answer; routes [n, layers, K]: from ``routes_from`` on, as far as they are known;
    the unknown rows after them are filled with NO_EXPERT.
    """
    tokens, prompt = text[sequence.prompt_len :], sequence.prompt_len - sequence.request.routes_from
    if routes is not None:
        padding = np.full((max(prompt + len(tokens) - len(routes), 0), *routes.shape[1:]), NO_EXPERT)
        routes = np.concatenate([routes, padding.astype(routes.dtype)])
    logprobs, edges, versions = sequence.sampled or _EMPTY_SAMPLES
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        edges=edges,
        versions=versions,
        stop=stop,
        text=decode_answer(tokens, sequence.request.sampling.stop_strings, stop, decode),
        support=Support.of(sequence.supports) if sequence.supports else None,
        experts=None if routes is None else routes[prompt:],
        prompt_experts=None if routes is None else routes[:prompt],
        drafted=sequence.drafted,
        accepted=sequence.accepted,
        passes=sequence.passes,
        cached_tokens=sequence.cached,
        recomputed=np.array(sequence.again, np.int32) if sequence.again else None,
        error="the logits are not finite" if stop is Stop.ERROR else "",
    )


def decode_answer(tokens: np.ndarray, strings: Seq[str], stop: Stop, decode: Decode | None) -> str:
    """Return the text of ``tokens``, without a stop token at the end, and up to a stop string if that ended
    it; "" without ``decode``."""
    if decode is None:
        return ""
    cut = cut_at_string(decode, tokens, strings) if stop is Stop.STRING else None
    return cut if cut is not None else decode((tokens[:-1] if stop is Stop.EOS else tokens).tolist())


_EMPTY_SAMPLES = (np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32))
