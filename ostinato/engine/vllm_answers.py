"""Requests as vLLM takes them, and its replies as completions. Pure."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ostinato.algo.noise import key
from ostinato.engine.requests import Limits, check_request, decode_answer
from ostinato.engine.serve import make_failed
from ostinato.engine.vllm_server import Reply, Unreachable
from ostinato.routes import route_dtype
from ostinato.types import NO_EXPERT, Completion, Request, Stop, Support

COLDEST = 0.01  # vLLM raises lower temperatures above 0 to this
NO_LOGPROB = -9999.0  # vLLM's value for a missing log-probability


def check_vllm_request(request: Request, limits: Limits) -> None:
    """Raises ValueError for a request that never fits (``check_request``) or that vLLM would answer
    differently from our engine: with a constraint, a temperature that it raises, or min_tokens beside stop
    strings."""
    sampling = request.sampling
    check_request(request, limits)
    if request.constraint is not None:
        raise ValueError("a request has a constraint, which only the engine in its own process can apply")
    if 0 < sampling.temperature < COLDEST:
        raise ValueError(
            f"sampling.temperature is {sampling.temperature}; vLLM takes 0 (greedy) or {COLDEST} and more"
        )
    if sampling.min_tokens and sampling.stop_strings:
        raise ValueError(
            f"sampling.min_tokens is {sampling.min_tokens} with stop_strings, which vLLM "
            "does not look for before as many tokens; drop one of them"
        )


def make_question(
    request: Request, model: str, salt: str, context: int, *, seeded: bool = True
) -> dict[str, Any]:
    """Make the body of the request to vLLM; only requests with the same ``salt`` share cached prefixes."""
    sampling, prompt_len = request.sampling, len(request.tokens)
    max_tokens = min(sampling.max_tokens, context - prompt_len)
    return {
        "model": model,
        "token_ids": request.tokens.tolist(),
        "cache_salt": salt + request.salt,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "max_tokens": max_tokens,
            "min_tokens": min(sampling.min_tokens, max_tokens),
            "stop_token_ids": list(sampling.stop_tokens),
            "stop": list(sampling.stop_strings),
            "ignore_eos": True,  # our eos is among the stop tokens
            "detokenize": bool(sampling.stop_strings),
            "logprobs": 0,  # of the sampled token only
            "seed": key((*request.seed, prompt_len)) >> 1 if seeded else None,  # its own for each turn
        },
    }


def parse_choice(reply: Reply, request: Request, model: str) -> tuple[dict[str, Any], int]:
    """Return (the single answer in the ``reply`` of a living server, number of its cached tokens). Raises
    ValueError if the request was refused, and Unreachable if the model is not loaded or another one has
    answered."""
    if reply.status == 404:  # our adapter is not, or no longer, loaded there
        raise Unreachable(f"vLLM answered {reply.error}")
    if reply.status != 200:
        raise ValueError(f"vLLM refused a request of {len(request.tokens)} tokens with {reply.error}")
    if reply.body["model"] != model:
        raise Unreachable(f"vLLM answered as {reply.body['model']!r}, and {model!r} was requested")
    details = reply.body["usage"].get("prompt_tokens_details") or {}
    return reply.body["choices"][0], int(details.get("cached_tokens") or 0)


def convert_answer(
    request: Request,
    choice: dict[str, Any],
    versions: np.ndarray,
    decode: Callable[[Sequence[int]], str] | None,
    *,
    cached: int = 0,
    num_experts: int | None = None,
) -> Completion:
    """Convert vLLM's answer to a completion; it is an ERROR if a token has no log-probability. Raises
    ValueError if the number of routes does not fit the tokens."""
    sampling = request.sampling
    tokens = np.array(choice["token_ids"], np.int32)
    logprobs = np.array([row["logprob"] for row in choice["logprobs"]["content"]], np.float32)
    stop = _parse_stop(choice)
    if len(logprobs) != len(tokens) or (logprobs <= NO_LOGPROB).any():
        return make_failed("vLLM gave tokens without log-probabilities: the logits are not finite")
    if sampling.temperature == 0:  # a greedy token is not drawn; vLLM gives its logprob at temperature 1
        logprobs = np.zeros_like(logprobs)
    routes = _parse_routes(choice, len(request.tokens) + len(tokens), num_experts)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        stop=stop,
        text=decode_answer(tokens, sampling.stop_strings, stop, decode),
        support=_parse_support(choice) if sampling.filtered else None,
        experts=None if routes is None else routes[len(request.tokens) :],
        prompt_experts=None if routes is None else routes[request.routes_from : len(request.tokens)],
        passes=len(tokens),
        cached_tokens=cached,
    )


def _parse_stop(choice: dict[str, Any]) -> Stop:
    reason = choice["finish_reason"]
    if reason == "stop":
        return Stop.STRING if isinstance(choice["stop_reason"], str) else Stop.EOS
    return {"length": Stop.LENGTH, "abort": Stop.ABORT}.get(reason, Stop.ERROR)


def _parse_support(choice: dict[str, Any]) -> Support | None:
    """Return the ids that the filters kept; None if the server does not report them
    (``--return-sampling-mask``)."""
    masks = choice.get("sampling_mask")
    return None if masks is None else Support.of([np.sort(np.array(ids, np.int32)) for ids in masks])


def _parse_routes(choice: dict[str, Any], length: int, num_experts: int | None) -> np.ndarray | None:
    """Return the experts [length, layers, top_k], NO_EXPERT for the last token; None for a dense model, or
    if the server does not report them (``--enable-return-routed-experts``). Raises ValueError for another
    number of tokens."""
    encoded = choice.get("routed_experts")
    if encoded is None or num_experts is None:
        return None
    rows = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if len(rows) != length - 1:
        raise ValueError(f"vLLM gave the experts of {len(rows)} tokens for an answer that ends at {length}")
    last_route = np.full((1, *rows.shape[1:]), NO_EXPERT)
    return np.concatenate([rows.astype(np.int32), last_route]).astype(route_dtype(num_experts))
