"""The promises of every engine (``engine_contract``), kept by the sampler of transformers' models.

``addressed`` holds here: noise is, and these logits are the same in every batch up to rounding; on models of
more bits docs/models.md says what may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_contract import CONTRACT, Subject
from small_transformers import OTHERS, SPEC, saved, shaken

pytest.importorskip("transformers", minversion="5.0")

from ostinato.hf.factors import init_sites
from ostinato.hf.model import TransformersModel, load_transformers
from ostinato.hf.sampler import TransformersEngine
from ostinato.model.packed import PackedAttention
from ostinato.types import NO_EXPERT, Request, Sampling, Segment

VOCAB = 384


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3_5_text", "minimax"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TransformersModel:
    folder: Path = saved(request.param, tmp_path_factory.mktemp(request.param), **OTHERS[request.param])
    return load_transformers(folder, dtype=torch.float32, device="cpu")


def scored(model: TransformersModel, policy: Any, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64))
    rows = PackedAttention((Segment(start=0, stop=len(ids)),))
    with torch.no_grad():
        hidden, _ = model(ids, torch.arange(len(ids)), rows, adapters=policy)
        log_p = model.logits(hidden).log_softmax(-1)
    return log_p[:-1].gather(1, ids[1:, None])[:, 0].numpy()


@pytest.fixture
def subject(model: TransformersModel) -> Subject:
    first, second = (shaken(init_sites(model.sites, SPEC, seed, "cpu")) for seed in (1, 2))
    engine = TransformersEngine(model, decode=lambda ids: " ".join(map(str, ids)), context_limit=64)
    return Subject(
        engine=engine,
        vocab=VOCAB,
        policies=(first, second),
        decode=lambda ids: " ".join(map(str, ids)),
        score=lambda policy, tokens: scored(model, policy, tokens),
    )


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


def test_prompts_of_any_length_share_a_batch_and_say_what_each_says_alone(
    subject: Subject, model: TransformersModel
) -> None:
    """Only prompts of one length did, so a step of four prompts took up to four forwards a token. States of a
    recurrence would run through padding: such models go on by length."""
    subject.engine.publish(subject.policies[0], 1)
    prompts = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9, 4, 9, 7, 30)]
    requests = [
        Request(tokens=tokens, sampling=Sampling(max_tokens=5), seed=(number,))
        for number, tokens in enumerate(prompts)
    ]
    alone = [subject.run([request])[0] for request in requests]
    counters = cast(TransformersEngine, subject.engine).counters
    before, steps = counters.padded, counters.prefilled
    together = subject.run(requests)
    assert counters.prefilled - steps == sum(map(len, prompts)) - 9  # equal prompts once
    assert counters.padded - before == (21 + 3 + 4 if model.pads else 0)  # batches of 30, 9 and of 7, 4, 3
    assert model.pads == (model.config.model_type == "gpt_oss")
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        for name in ("experts", "prompt_experts"):
            if (routes := getattr(theirs, name)) is not None:
                np.testing.assert_array_equal(np.sort(getattr(ours, name)), np.sort(routes))


def test_routes_are_those_of_the_forward_of_training(subject: Subject, model: TransformersModel) -> None:
    subject.engine.publish(subject.policies[0], 1)
    for answer, request in zip(subject.run(subject.many(4)), subject.many(4), strict=True):
        if model.config.moe is None:
            assert answer.experts is None
            continue
        assert answer.experts is not None and answer.prompt_experts is not None
        whole = torch.from_numpy(np.concatenate([request.tokens, answer.tokens]).astype(np.int64))
        rows = PackedAttention((Segment(start=0, stop=len(whole)),))
        with torch.no_grad():
            _, native = model(whole, torch.arange(len(whole)), rows, adapters=subject.policies[0])
        assert native is not None
        routes = np.concatenate([answer.prompt_experts, answer.experts])
        assert (routes[-1] == NO_EXPERT).all()
        np.testing.assert_array_equal(np.sort(routes[:-1]), np.sort(native[:-1].numpy()))
