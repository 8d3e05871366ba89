"""Tokens in, tokens out: vLLM's /inference/v1/generate, which other trainers call (verifiers, prime-rl)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ostinato.apps.serve.bodies import ACCOUNTS, Id, Sampled, Strict
from ostinato.apps.serve.calls import Answer, Call, Usage
from ostinato.apps.serve.openai_chat import logprob_entries


class GenerateParams(Sampled):
    """``sampling_params``."""

    harmless = frozenset({"skip_special_tokens", "detokenize", "output_kind"})  # of a text, which is not sent
    logprobs: Annotated[int, Field(ge=0)] | None = None


class GenerateBody(Strict):
    """POST /inference/v1/generate."""

    harmless = ACCOUNTS
    model: str = ""
    token_ids: Annotated[list[Id], Field(min_length=1)]
    sampling_params: GenerateParams
    stream: Literal[False] | None = False

    def to_call(self) -> Call:
        params = self.sampling_params
        call = params.call(
            tokens=tuple(self.token_ids),
            max_tokens=16 if params.max_tokens is None else params.max_tokens,
            logprobs=params.logprobs is not None,
            top_logprobs=params.logprobs or 0,
        )
        return replace(call, model=self.model)


def generation(id_: str, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
    """The response; in log-probabilities tokens have the text ``token_id:42``."""
    choices = []
    for index, answer in enumerate(answers):
        entries = logprob_entries(call, answer.emitted, lambda token: f"token_id:{token}")
        choices.append(
            {
                "index": index,
                "finish_reason": answer.finish_reason,
                "token_ids": answer.completion.tokens.tolist(),
                "logprobs": {"content": entries} if call.logprobs else None,
            }
        )
    return {"request_id": id_, "choices": choices, "usage": Usage.of(answers).body()}
