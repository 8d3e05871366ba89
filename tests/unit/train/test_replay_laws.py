"""The laws of routing replay (R3, arXiv 2510.11370) on our decoder, for every kind of router that it knows.

Numbers in brackets are those of docs/replay.md, which says where the other laws are tested.
Each law was once broken silently somewhere: the loss stays finite, and the run learns from noise.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion
from reference.plain_layers import experts_loop
from rounding import hidden_rounding
from torch import Tensor
from worlds import KINDS, VOCAB, closed_form, generator, moe_of, native_choice, random_routes, siblings, tiny

from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.algo.routing import Cause, Misaligned, require_aligned
from ostinato.engine.local import LocalEngine
from ostinato.hf.routes import Routes
from ostinato.model.attention import CausalAttention
from ostinato.model.config import MoEConfig, Scoring
from ostinato.model.config_keys import _FAMILY_KEYS
from ostinato.model.decoder import Decoder
from ostinato.model.lora import init_adapters
from ostinato.model.moe import route
from ostinato.model.native import BuildError, load_kernels
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.model.peft_io import merge_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.model.weights import Moe
from ostinato.routes import routes_from_json, routes_to_json
from ostinato.types import NO_EXPERT, Completion, Request, Sampling, Stop

ROWS = 12
TOKENS = torch.arange(ROWS) * 23 % VOCAB
POSITIONS = torch.arange(ROWS)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
ROLES = ("attn", "mlp", "shared", "experts", "router")


def run(decoder: Decoder, routing: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    hidden, native = decoder(TOKENS, POSITIONS, CausalAttention(), routing=routing, **options)
    return hidden, native


def shaken(decoder: Decoder, **spec: Any) -> Any:
    """Adapters of everything, the router too, with B away from zero."""
    adapters = init_adapters(decoder.config, AdapterSpec(rank=2, targets=ROLES, **spec), seed=2)
    with torch.no_grad():
        for _, b in adapters.tensors.values():
            b.normal_(0, 0.2, generator=generator(b.numel()))
    return adapters


class Call(NamedTuple):
    """What one router was given and answered, and whose experts were run with it."""

    logits: Tensor
    bias: Tensor | None
    ids: Tensor
    weights: Tensor
    gate_up: Tensor


def watched() -> tuple[Ops, list[Call]]:
    """Ops that remember the routers and experts of a forward, layer after layer."""
    calls: list[Call] = []
    requested: list[tuple[Tensor, Tensor | None]] = []

    def watched_route(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None, given: Tensor | None
    ) -> tuple[Tensor, ...]:
        requested.append((logits, bias))
        return TORCH_OPS.route(logits, moe, bias, given)

    def watched_experts(
        x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: Any
    ) -> Tensor:
        calls.append(Call(*requested[-1], ids, weights, gate_up))
        return TORCH_OPS.experts(x, ids, weights, gate_up, down, lora)

    return replace(TORCH_OPS, route=watched_route, experts=watched_experts), calls


# what replay changes, and what it does not


@EVERY_KIND
@torch.no_grad()
def test_off_is_the_plain_forward_before_and_after(kind: str) -> None:
    """[1, 15] Replay is an argument: the reference model and evaluation, which give none, are the model
    itself bit for bit, and so is a routing that knows no row."""
    decoder = tiny(kind)
    hidden, native = run(decoder)
    other, _ = run(decoder, random_routes(decoder, ROWS))
    unknown = torch.full_like(native, NO_EXPERT)
    for again, same in (run(decoder), run(decoder, unknown)):
        assert torch.equal(again, hidden) and torch.equal(same, native)
    assert (other - hidden).abs().max() > 1e-2


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_replaying_its_own_choice_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    """[3] With and without checkpoints, whatever the layout in memory of what is given."""
    decoder = tiny(kind, dtype)
    hidden, native = run(decoder)
    strided = native.transpose(0, 1).contiguous().transpose(0, 1)
    for given_ids in (native, native.long(), strided, native.int()):
        again, same = run(decoder, given_ids)
        assert torch.equal(again, hidden) and torch.equal(same, native)


@EVERY_KIND
def test_recording_changes_no_token(kind: str) -> None:
    """[2] An engine that records routes samples the same tokens, at the same log-probabilities."""

    def answers(record: bool) -> list[Completion]:
        engine = LocalEngine(tiny(kind), kv_memory_mb=1, context_limit=64, record_routing=record)
        requests = [
            Request(tokens=TOKENS.numpy()[:n], sampling=Sampling(max_tokens=6), seed=(n,)) for n in (3, 7)
        ]

        async def collect() -> list[Completion]:
            found = [one async for one in engine.generate(requests)]
            return [completion for _, completion in sorted(found, key=lambda one: one[0])]

        return asyncio.run(collect())

    for off, on in zip(answers(False), answers(True), strict=True):
        assert np.array_equal(off.tokens, on.tokens) and np.array_equal(off.logprobs, on.logprobs)
        assert off.experts is None and on.experts is not None


@EVERY_KIND
@torch.no_grad()
def test_given_experts_run_in_their_own_layer_and_order(kind: str) -> None:
    """[4, 11, 21] Column l of a routing belongs to the l-th mixture layer, wherever dense layers stand; its
    ids come out as they went in; every router is called once, and none is bypassed."""
    decoder = tiny(kind)
    routing, (ops, calls) = random_routes(decoder, ROWS), watched()
    run(decoder, routing, ops=ops)
    layers = moe_of(decoder).layers
    assert len(calls) == len(layers) == decoder.num_moe_layers
    for column, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        mixture = decoder.blocks[layer].mlp
        assert isinstance(mixture, Moe) and call.gate_up is mixture.gate_up
        assert torch.equal(call.ids, routing[:, column].long())
    dense = set(range(decoder.config.num_layers)) - set(layers)
    assert not any(isinstance(decoder.blocks[layer].mlp, Moe) for layer in dense)


@EVERY_KIND
@torch.no_grad()
def test_the_routing_returned_is_the_models_own(kind: str) -> None:
    """[10] Also under replay, where it says how well the replayed routes agree: otherwise the gate would
    compare them with themselves and find nothing, ever."""
    decoder = tiny(kind)
    routing, (ops, calls) = random_routes(decoder, ROWS), watched()
    routing[3:5] = NO_EXPERT
    _, native = run(decoder, routing, ops=ops)
    assert native.dtype == torch.int16 and native.shape == routing.shape
    for column, call in enumerate(calls):
        expected = native_choice(call.logits, call.bias, moe_of(decoder))
        assert [set(row) for row in native[:, column].tolist()] == expected
    assert not torch.equal(native, routing)


@EVERY_KIND
@torch.no_grad()
def test_weights_are_the_formula_on_live_logits(kind: str) -> None:
    """[5, 7] Ids are replayed, never weights: under fixed ids another router gives other weights, its own
    formula's, and none is zero, also where a group limit excludes the expert."""
    decoder = tiny(kind)
    moe, routing, seen = moe_of(decoder), random_routes(decoder, ROWS), []
    for _ in range(2):
        ops, calls = watched()
        run(decoder, routing, ops=ops)
        for call in calls:
            torch.testing.assert_close(call.weights, closed_form(call.logits, call.ids, moe))
            assert (call.weights > 0).all()
        seen.append(calls[0].weights)
        for layer in moe.layers:
            mixture = decoder.blocks[layer].mlp
            assert isinstance(mixture, Moe)
            mixture.router.mul_(1.5)
    assert (seen[0] - seen[1]).abs().max() > 1e-2


@st.composite
def routers(draw: st.DrawFn) -> MoEConfig:
    """Every combination that ``MoEConfig`` can express, one expert and all experts included."""
    groups = draw(st.sampled_from([1, 2, 4]))
    size = draw(st.integers(2 if groups > 1 else 1, 5))
    kept = draw(st.integers(1, groups))
    return MoEConfig(
        num_experts=groups * size,
        top_k=draw(st.integers(1, kept * size)),
        intermediate_size=4,
        layers=(0,),
        scoring=draw(st.sampled_from(Scoring)),
        norm_topk=draw(st.booleans()),
        scaling=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        topk_groups=kept,
    )


@given(
    moe=routers(), seed=st.integers(0, 999), biased=st.booleans(), known=st.lists(st.booleans(), max_size=6)
)
def test_any_router_replays_any_choice(moe: MoEConfig, seed: int, biased: bool, known: list[bool]) -> None:
    """[4-7, 18] Given rows are obeyed, unknown ones (and those of an empty batch) choose for themselves;
    weights and their gradient are those of the closed form."""
    rows = len(known)
    x = (2 * torch.randn(rows, moe.num_experts, generator=generator(seed)).double()).requires_grad_()
    bias = torch.randn(moe.num_experts, generator=generator(seed + 1)) if biased else None
    order = torch.rand(rows, moe.num_experts, generator=generator(seed + 2)).argsort(-1)
    requested = torch.where(torch.tensor(known, dtype=torch.bool)[:, None], order[:, : moe.top_k], NO_EXPERT)
    ids, weights, native = route(x, moe, bias, requested)
    free, _, alone = route(x, moe, bias)
    assert torch.equal(free, alone) and torch.equal(native, free)
    assert [set(row) for row in native.tolist()] == native_choice(x.detach(), bias, moe)
    assert torch.equal(ids, torch.where(requested == NO_EXPERT, native, requested))
    expected = closed_form(x, ids, moe)
    torch.testing.assert_close(weights, expected)
    upstream = torch.rand(weights.shape, generator=generator(seed + 3)).double()
    ours, theirs = (
        torch.autograd.grad(one, x, upstream, retain_graph=True)[0] for one in (weights, expected)
    )
    torch.testing.assert_close(ours, theirs)
    assert (weights > 0).all()


@EVERY_KIND
def test_the_gradient_of_the_router_is_the_closed_forms(kind: str) -> None:
    """[6] Every parameter's gradient under forced routes is that of a forward whose weights are the closed
    form, and a router's is what finite differences say: replay keeps the router's gradient alive."""
    decoder = tiny(kind, torch.float64).set_trainable(True)
    routing = random_routes(decoder, ROWS)

    def by_hand(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None, given_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids = given_ids.long()
        return ids, closed_form(logits, ids, moe), ids

    def loss(ops: Ops) -> Tensor:
        return decoder.logits(run(decoder, routing, ops=ops)[0]).square().mean()

    names = [name for name, parameter in decoder.named_parameters() if parameter.requires_grad]
    leaves = [decoder.get_parameter(name) for name in names]
    ours, expected = (
        torch.autograd.grad(loss(ops), leaves) for ops in (TORCH_OPS, replace(TORCH_OPS, route=by_hand))
    )
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9)
    routers_found = 0
    for name, leaf, gradient in zip(names, leaves, ours, strict=True):
        if not name.endswith("router"):
            continue
        routers_found += 1
        with torch.no_grad():
            direction = torch.randn(leaf.shape, generator=generator(3)).double()
            leaf.add_(direction, alpha=1e-6)
            above = loss(TORCH_OPS)
            leaf.sub_(direction, alpha=2e-6)
            slope = float(above - loss(TORCH_OPS)) / 2e-6
            leaf.add_(direction, alpha=1e-6)
        assert gradient.abs().max() > 0
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-8)
    assert routers_found == decoder.num_moe_layers


@EVERY_KIND
@torch.no_grad()
def test_the_order_of_columns_is_only_an_order_of_sums(kind: str) -> None:
    """[8]"""
    decoder = tiny(kind)
    routing = random_routes(decoder, ROWS)
    hidden, native = run(decoder, routing)
    turned, same = run(decoder, routing.flip(-1))
    torch.testing.assert_close(turned, hidden, rtol=0, atol=hidden_rounding(decoder.config, ROWS, hidden))
    assert torch.equal(same, native)


# what is refused, and what is noticed


def first_row(routing: Tensor, *ids: int) -> Tensor:
    changed = routing.clone()
    changed[0, 0] = torch.tensor(ids)
    return changed


@EVERY_KIND
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r[:-1], r"\[tokens, MoE layers, K\]"),  # the T - 1 rows of an engine, as they are
        (lambda r: r[..., :2], r"\[tokens, MoE layers, K\]"),
        (lambda r: torch.cat((r, r), 1), r"\[tokens, MoE layers, K\]"),  # dense layers have no column
        (lambda r: r.float(), "dtype"),
        (lambda r: first_row(r, 0, 0, 0), "same expert twice"),  # a buffer that was never written
        (lambda r: first_row(r, 4, 1, 4), "same expert twice"),
        (lambda r: first_row(r, 1, 2, 8), "experts are 0 to 7"),
        (lambda r: first_row(r, 1, 2, -2), "ids from -2"),
        (lambda r: first_row(r, 1, 2, NO_EXPERT), "whole or not at all"),
    ],
)
def test_what_is_no_routing_is_refused(kind: str, change: Callable[[Tensor], Tensor], words: str) -> None:
    """[9]"""
    decoder = tiny(kind)
    with pytest.raises(ValueError, match=words):
        run(decoder, change(random_routes(decoder, ROWS)))


@pytest.mark.parametrize("top_k", [1, 2])
@torch.no_grad()
def test_the_expert_255_of_256_is_no_unknown_row(top_k: int) -> None:
    """[9, 22] In a byte, NO_EXPERT is 255: torch compares uint8 with -1 as if it were, so routes in the
    narrowest type that holds them lost their last expert, without a word where K is 1."""
    decoder = tiny("softmax", num_experts=256, num_experts_per_tok=top_k, moe_intermediate_size=4)
    routing = random_routes(decoder, ROWS)
    routing[:, :, 0], routing[:, :, 1:] = 255, 7
    expected, _ = run(decoder, routing)
    assert torch.equal(run(decoder, routing.to(torch.uint8))[0], expected)


@EVERY_KIND
def test_scores_that_underflow_are_no_nan(kind: str) -> None:
    """[7] The best experts have scores that fp32 can hold; given ones may all be 0, and 0 / 0 was NaN."""
    moe = moe_of(tiny(kind))
    x = torch.tensor([[0.0] * 5 + [-150.0] * 3], requires_grad=True)
    _, weights, _ = route(x, moe, None, torch.tensor([[5, 6, 7]]))
    weights.square().sum().backward()
    assert weights.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


@EVERY_KIND
@torch.no_grad()
def test_no_rows_are_no_work(kind: str) -> None:
    """[9]"""
    decoder, nothing = tiny(kind), torch.zeros(0, dtype=torch.long)
    routing = random_routes(decoder, 0)
    for given_ids in (None, routing):
        hidden, native = decoder(nothing, nothing, CausalAttention(), routing=given_ids)
        assert hidden.shape == (0, 16) and native.shape == routing.shape


@EVERY_KIND
@torch.no_grad()
def test_the_last_row_may_be_unknown(kind: str) -> None:
    """[10] T tokens have T - 1 recorded rows, for the last token sampled was never an input. Its row is
    in no context: what it chooses changes no other row."""
    decoder = tiny(kind)
    whole = random_routes(decoder, ROWS)
    recorded = whole.clone()
    recorded[-1] = NO_EXPERT
    one, other = run(decoder, whole)[0], run(decoder, recorded)[0]
    # an expert that has one row more adds in another order: 1.07e-6 apart on AVX2, which 1e-6 did not allow
    torch.testing.assert_close(one[:-1], other[:-1], rtol=0, atol=hidden_rounding(decoder.config, ROWS, one))
    assert (one[-1] - other[-1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("cause", "spoil"),
    [
        (Cause.SHIFTED, lambda r: r.roll(1, 0)),
        (Cause.SHIFTED, lambda r: r.roll(-1, 0)),
        (Cause.LAYERS, lambda r: r.roll(1, 1)),
        (Cause.LAYERS, lambda r: r.flip(1)),
    ],
)
@pytest.mark.parametrize("kind", ["softmax", "top-k-then-softmax", "olmoe", "sigmoid-bias-groups"])
@torch.no_grad()
def test_a_misplaced_routing_is_noticed_from_the_forward_that_replays_it(
    kind: str, cause: Cause, spoil: Callable[[Tensor], Tensor]
) -> None:
    """[10] By the routing that it returns, in the same forward, and with the right name."""
    decoder = tiny(kind)
    tokens = torch.randint(0, VOCAB, (64,), generator=generator(4))
    _, recorded = decoder(tokens, torch.arange(64), CausalAttention())
    wrong = spoil(recorded)
    _, native = decoder(tokens, torch.arange(64), CausalAttention(), routing=wrong)
    with pytest.raises(Misaligned) as caught:
        require_aligned([native.numpy()], [wrong.numpy()])
    assert caught.value.diagnosis.cause is cause


# rows, batches, backward


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    prompt=st.integers(1, 5),
    answers=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    budget=st.integers(4, 40),
)
@torch.no_grad()
def test_packed_rows_are_their_sequences(kind: str, prompt: int, answers: list[int], budget: int) -> None:
    """[12] Routes travel with their tokens through packing and shared prompts: no row meets another's."""
    decoder = tiny(kind)
    samples = [*siblings(decoder, prompt, answers, 0), *siblings(decoder, prompt + 1, answers, 1)]
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    for part in pack(samples, weights, tokens_per_microbatch=budget).microbatches:
        assert part.experts is not None
        packed, _ = decoder(
            torch.from_numpy(part.tokens).long(),
            torch.from_numpy(part.positions).long(),
            PackedAttention(part.segments),
            routing=torch.from_numpy(part.experts),
        )
        for index in np.unique(part.sample_idx):
            sample = samples[index]
            assert sample.experts is not None
            alone, _ = decoder(
                torch.from_numpy(sample.tokens).long(),
                torch.arange(len(sample.tokens)),
                CausalAttention(),
                routing=torch.from_numpy(sample.experts),
            )
            theirs = packed[torch.from_numpy(part.rows[part.sample_idx == index]).long()]
            bound = hidden_rounding(decoder.config, len(sample.tokens), alone)
            torch.testing.assert_close(theirs, alone[sample.prompt_len - 1 : -1], rtol=0, atol=bound)


@EVERY_KIND
def test_checkpoints_recompute_with_the_same_experts(kind: str) -> None:
    """[13, 14] Partly known routes, two microbatches in flight with routes of their own, backwards in the
    other order: gradients are bit for bit those without checkpoints, and those of one at a time."""
    decoder = tiny(kind)
    adapters = shaken(decoder)
    leaves = list(adapters.parameters())
    routes = [random_routes(decoder, ROWS, seed=seed) for seed in (1, 2)]
    for one in routes:
        one[[2, -1]] = NO_EXPERT

    def loss(routing: Tensor | None, recompute: bool) -> Tensor:
        hidden, _ = run(decoder, routing, adapters=adapters, recompute=recompute)
        return decoder.logits(hidden).square().mean()

    alone = [torch.autograd.grad(loss(one, False), leaves) for one in routes]
    in_flight = [loss(one, True) for one in routes]
    with torch.no_grad():
        loss(None, False)  # a native forward in between, as of a reference model
    backwards = [torch.autograd.grad(one, leaves) for one in reversed(in_flight)][::-1]
    for kept, recomputed in zip(alone, backwards, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))
    native = torch.autograd.grad(loss(None, False), leaves)
    assert not any(torch.allclose(alone[0][i], native[i], atol=1e-5) for i in range(len(leaves)))


@EVERY_KIND
@torch.no_grad()
def test_two_models_keep_apart(kind: str) -> None:
    """[14] Layer by layer in turns, as threads of two models would run: there is nothing that they share."""
    one, other = tiny(kind), tiny(kind).init_weights(7)
    routes, expected = random_routes(one, ROWS), run(other)[0]

    def interrupting(layer: int, *qkv: Any) -> Tensor:
        assert torch.equal(run(other)[0], expected)
        return CausalAttention()(layer, *qkv)

    interrupted, _ = one(TOKENS, POSITIONS, interrupting, routing=routes)
    assert torch.equal(interrupted, run(one, routes)[0])


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), known=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
@torch.no_grad()
def test_unknown_rows_are_native_and_known_rows_are_not(kind: str, known: list[bool]) -> None:
    """[18] In a model of one layer a row depends on its own experts alone: it is a known row of the forced
    model, or a row of the native one, whatever its neighbours are."""
    single = {"num_hidden_layers": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}
    for key in single.keys() - {"num_hidden_layers"} - KINDS[kind].keys():
        del single[key]
    single |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in KINDS[kind] else {}
    decoder, mask = tiny(kind, **single), torch.tensor(known)
    forced = random_routes(decoder, ROWS)
    native, own = run(decoder)
    partly, same = run(decoder, torch.where(mask[:, None, None], forced, NO_EXPERT).to(torch.int16))
    expected = torch.where(mask[:, None], run(decoder, forced)[0], native)
    torch.testing.assert_close(partly, expected, rtol=0, atol=hidden_rounding(decoder.config, ROWS, expected))
    assert torch.equal(same, own)


@EVERY_KIND
@torch.no_grad()
def test_implementations_of_experts_agree(kind: str) -> None:
    """[19] Grouped products, the loop from the definition, and native kernels where they can be built."""
    decoder = tiny(kind)
    routing = random_routes(decoder, ROWS)
    hidden, native = run(decoder, routing)
    sets = [replace(TORCH_OPS, experts=experts_loop)]
    with suppress(BuildError):
        sets.append(load_kernels().ops)
    for ops in sets:
        other, same = run(decoder, routing, ops=ops)
        torch.testing.assert_close(other, hidden, rtol=1e-4, atol=1e-4)
        assert torch.equal(same, native)


@EVERY_KIND
@pytest.mark.parametrize("scheme", list(ExpertScheme))
def test_adapters_merged_or_not_are_one_function_of_the_routes(kind: str, scheme: ExpertScheme) -> None:
    """[20] Experts, attention and router adapted, under routes that no router would choose; the router's own
    factors have a gradient."""
    decoder = tiny(kind)
    adapters, routing = shaken(decoder, expert_scheme=scheme), random_routes(decoder, ROWS)
    unmerged, native = run(decoder, routing, adapters=adapters)
    with torch.no_grad():
        merged, same = run(merge_adapters(decoder, adapters), routing)
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
    assert torch.equal(same, native) and not torch.equal(same, run(decoder, routing)[1])
    unmerged.square().mean().backward()
    for name, pair in adapters.tensors.items():
        if name.endswith("router"):
            assert all(leaf.grad is not None and leaf.grad.abs().max() > 0 for leaf in pair)


# sizes, and the census


@pytest.mark.parametrize("experts", [1, 2, 3, 128, 129, 255, 256, 257, 1024])
@torch.no_grad()
def test_routes_survive_storage_at_any_number_of_experts(experts: int) -> None:
    """[22] Recorded, stored, read and replayed, the highest id included: a byte holds the ids of 256
    experts, and has no number left to say that a row is unknown."""
    top_k = min(experts, 4)
    decoder = tiny("softmax", num_experts=experts, num_experts_per_tok=top_k, moe_intermediate_size=4)
    recorded = random_routes(decoder, ROWS)
    recorded[0, :, 0] = experts - 1
    recorded[0, :, 1:] = torch.arange(top_k - 1)
    recorded[-1] = NO_EXPERT
    done = completion(
        TOKENS[4:].numpy(),
        stop=Stop.LENGTH,
        experts=recorded[4:].numpy(),
        prompt_experts=recorded[:4].numpy(),
    )
    stored = json.dumps(routes_to_json(Routes.from_completion(done, experts).dense()))
    back = torch.from_numpy(routes_from_json(json.loads(stored)))
    assert torch.equal(back, recorded.int())
    assert torch.equal(run(decoder, back)[0], run(decoder, recorded)[0])


def test_every_router_that_a_config_can_ask_for_is_here() -> None:
    """[24] A family or a formula that is added has to be added above, or this fails."""
    mixtures = {family for family, keys in _FAMILY_KEYS.items() if "num_experts_per_tok" in keys}
    assert mixtures == {raw["model_type"] for raw in KINDS.values()}
    kinds = [moe_of(tiny(kind)) for kind in KINDS]
    assert {moe.scoring for moe in kinds} == set(Scoring)
    for name in ("norm_topk", "correction_bias"):
        assert {getattr(moe, name) for moe in kinds} == {False, True}, name
    for name in ("scaling", "num_groups", "topk_groups", "shared_intermediate_size"):
        assert len({getattr(moe, name) for moe in kinds}) > 1, name
    layouts = {moe.layers for moe in kinds}
    assert layouts >= {(0, 1, 2), (1, 2), (0, 2), (1,)}  # all, dense first, dense in between, every second


def test_the_page_has_all_laws_and_files_of_tests_that_exist(repository: Path) -> None:
    laws = (repository / "docs" / "replay.md").read_text(encoding="utf-8").partition("## Laws")[2]
    listed = laws.partition("Our model:")[0]
    numbers = [int(number) for number in re.findall(r"(?:;\s|\n\n)(\d+) (?=[a-z])", listed)]
    assert numbers == list(range(1, 26))
    files = re.findall(r"`(tests/\S+\.py)`", laws)
    assert files and all((repository / file).is_file() for file in files)
