"""FLOPs from shapes, and work from data, against twins that count row by row and pair by pair. The profiler
has its say in ``tests/e2e/test_flops_profiler.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion as done_
from nouns import sample_of
from reference.plain_layers import segment_mask
from reference.plain_pack import pad
from worlds import KINDS, SIZES

from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.apps.plan.problem import find_model
from ostinato.model.config import parse_config
from ostinato.model.flops import FlopModel, Part, Work
from ostinato.model.shapes import ROLES, AdapterSpec, ExpertScheme
from ostinato.pipeline.account import compute_answer_work, compute_batch_work
from ostinato.types import Completion, Sample

DENSE = {**SIZES, "model_type": "llama"}
FAMILIES: dict[str, dict[str, Any]] = {"dense": DENSE, **{k: {**SIZES, **v} for k, v in KINDS.items()}}
WORK = Work(7, 50, 5)


def flops_of(family: str, adapter: AdapterSpec | None = None, **options: Any) -> FlopModel:
    return FlopModel.of(parse_config(FAMILIES[family]), adapter, **options)


def specs() -> st.SearchStrategy[AdapterSpec]:
    targets = st.lists(st.sampled_from(ROLES), min_size=1, unique=True)
    return st.builds(
        AdapterSpec,
        rank=st.integers(1, 5),
        targets=targets.map(lambda chosen: ("attn", *chosen)),  # no model lacks attention
        expert_scheme=st.sampled_from(ExpertScheme),
        expert_rank=st.sampled_from([None, 2]),
    )


# ---- the model


@pytest.mark.parametrize(
    ("name", "billions", "pair"),
    [
        ("smollm2-135m", 0.1345, 30 * 9 * 4 * 64),  # its embedding is its head
        ("qwen3-30b-a3b", 3.35, 48 * 32 * 4 * 128),  # "3.3 billion activated"
        ("deepseek-v3", 37.5, 61 * 128 * 2 * (192 + 128)),  # "37 billion activated"
    ],
)
def test_a_token_costs_twice_the_parameters_that_it_meets(name: str, billions: float, pair: float) -> None:
    """The published counts of three models, which have the embedding in them. The weighted sum of the
    experts' answers meets no parameter, and is nothing beside them."""
    parsed = find_model(name).config
    flops = FlopModel.of(parsed, None)
    embedding = 0 if parsed.tie_embeddings else parsed.vocab_size * parsed.hidden_size
    assert flops.forward(Work(tokens=1, logits=1)) / 2 + embedding == pytest.approx(1e9 * billions, rel=2e-3)
    assert flops.forward(Work(pairs=1)) == pair


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_laws_of_adapters(data: st.DataObject) -> None:
    """Price is linear in work; an adapter adds its own products to the base and never saves any; recompute is
    one more forward of the layers; an entropy term is one more product at the head."""
    family, spec = data.draw(st.sampled_from([*FAMILIES])), data.draw(specs())
    flops, full = flops_of(family, spec), flops_of(family)
    more = Work(*data.draw(st.tuples(*[st.integers(0, 1000)] * 3)))
    for price in (flops.forward, flops.backward, flops.base):
        assert price(WORK + more) == price(WORK) + price(more) and price(Work()) == 0
    lora = flops.parts[Part.LORA]
    assert flops.base(more) == full.forward(more) == flops.forward(more) - lora.of(more)
    assert lora.tokens > 0 and lora.pairs == lora.logits == 0
    assert 0 < flops.backward(WORK) < full.backward(WORK) + 2 * lora.of(WORK)
    layers = replace(WORK, logits=0)  # attention is adapted in every layer, so every layer has a gradient
    again = flops_of(family, spec, recompute=True)
    assert again.backward(WORK) == flops.backward(WORK) + flops.forward(layers)
    assert again.forward(WORK) == flops.forward(WORK)
    entropy = flops_of(family, spec, entropy_gradient=True)
    assert entropy.backward(WORK) == flops.backward(WORK) + flops.forward(Work(logits=WORK.logits))


# ---- batches


def samples() -> st.SearchStrategy[list[Sample]]:
    lengths = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)))

    def built(groups: list[tuple[int, list[int]]]) -> list[Sample]:
        return [
            sample_of(np.arange(prompt + answer), prompt, group=group)
            for group, (prompt, answers) in enumerate(groups)
            for answer in answers
        ]

    return lengths.filter(bool).map(built)


@given(samples(), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_batch_counts_the_pairs_of_its_mask(found: list[Sample], budget: int) -> None:
    weights = aggregation_weights(found, Aggregation.TOKEN)
    batch, apart = pack(found, weights, tokens_per_microbatch=budget), pad(found, weights)
    work = compute_batch_work(batch)
    assert work.pairs == sum(int(segment_mask(part.segments).sum()) for part in batch.microbatches)
    assert work.tokens == sum(len(part.tokens) for part in batch.microbatches)
    assert work.logits == batch.num_tokens == compute_batch_work(apart).logits
    assert work.tokens <= compute_batch_work(apart).tokens and work.pairs <= compute_batch_work(apart).pairs


# ---- rollouts


def row_by_row(prompt: int, completion: Completion) -> Work:
    """The twin: every row that an engine has to run, one after the other."""
    injected = [False] * len(completion.tokens)
    if completion.injected is not None:
        injected = completion.injected.tolist()
    known = [True] * prompt + injected
    ran = Work()
    for place in range(completion.cached_tokens, prompt + max(0, len(injected) - 1)):
        gives_a_token = prompt <= place + 1 < len(known) and not known[place + 1]
        ran += Work(1, place + 1, int(gives_a_token))
    return ran


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_an_answer_is_as_many_rows_as_an_engine_runs(data: st.DataObject) -> None:
    prompt, length = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 20))
    cached = data.draw(st.integers(0, prompt - 1))
    injected = data.draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
    marks = None if injected is None else np.array(injected, bool)
    completion = done_(length, cached_tokens=cached, injected=marks)
    work = compute_answer_work(prompt, cached, completion)
    assert work == row_by_row(prompt, completion)
    assert work.logits == length - sum(injected or [])
