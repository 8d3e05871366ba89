"""SFT and DPO on the accumulating trainer: against padded rows in plain torch, and the law of packing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding, terms_of
from worlds import VOCAB, adapters_of, tiny_decoder

from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.train.accumulate import Accumulator, Adam, Row
from ostinato.train.supervised import answer_logprobs, make_row, preferences, supervised

Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


def rows_of(count: int = 6, seed: int = 0) -> list[Row]:
    """Chats of two turns: a prompt, an answer, a reply and an answer."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        lengths = rng.integers(1, 6, 4)
        mask = np.repeat([False, True, False, True], lengths)
        rows.append(make_row(rng.integers(0, VOCAB, len(mask)).astype(np.int32), mask))
    return rows


def pairs_of(count: int = 4, seed: int = 1) -> list[tuple[Row, Row]]:
    """Two answers to each prompt."""
    rng, pairs = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.integers(2, 6)))
        answers = [rng.integers(0, VOCAB, int(rng.integers(1, 7))) for _ in range(2)]
        whole = [np.concatenate([prompt, answer]).astype(np.int32) for answer in answers]
        chosen, rejected = (make_row(one, np.arange(len(one)) >= len(prompt)) for one in whole)
        pairs.append((chosen, rejected))
    return pairs


def mean(sums: dict[str, float]) -> float:
    return sums["loss"] / sums["count"]


def made(decoder: Decoder, budget: int = 2048, seed: int = 0) -> Accumulator:
    return Accumulator(decoder, adapters_of(decoder, seed), tokens_per_microbatch=budget)


def gradients(adapters: Adapters) -> Gradients:
    pairs = adapters.tensors.items()
    leaves = {f"{name}.{part}": leaf for name, pair in pairs for part, leaf in zip("AB", pair, strict=True)}
    return {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}


def padded_logprobs(decoder: Decoder, adapters: Adapters, rows: list[Row]) -> tuple[Any, Any]:
    """Log-probabilities and masks [rows, longest], the rows one after the other and padded with zeros."""
    longest = max(len(row.tokens) for row in rows)
    found, masks = [], []
    for row in rows:
        length = len(row.tokens)
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        hidden, _ = decoder(tokens, torch.arange(length), CausalAttention(), adapters=adapters)
        log_p = torch.log_softmax(decoder.logits(hidden).float(), -1)
        scored = log_p.gather(1, torch.from_numpy(row.targets)[:, None]).squeeze(1)
        found.append(torch.nn.functional.pad(scored, (0, longest - length)))
        mask = torch.from_numpy(row.values["weights"])
        masks.append(torch.nn.functional.pad(mask, (0, longest - length)))
    return torch.stack(found), torch.stack(masks)


def close(decoder: Decoder, one: Gradients, other: Gradients) -> None:
    assert one and one.keys() == other.keys()
    bound = rounding(torch.float32, 4 * terms_of(decoder.config, 64), 1.0)
    for name, grad in one.items():
        scale = max(1.0, float(other[name].abs().max()))
        assert float((grad - other[name]).abs().max()) <= bound * scale, name


def test_the_first_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="first token"):
        make_row(np.array([1, 2], np.int32), np.array([True, True]))


@pytest.mark.parametrize("budget", [16, 2048])
def test_the_loss_is_the_mean_over_assistant_tokens(decoder: Decoder, budget: int) -> None:
    rows, one, twin = rows_of(), made(decoder, budget), made(decoder)
    sums = supervised(one, rows, learn=True)
    logprobs, masks = padded_logprobs(decoder, twin.adapters, rows)
    loss = -(logprobs * masks).sum() / masks.sum()
    loss.backward()
    assert sums["count"] == sums["tokens"] == int(masks.sum())
    assert math.isclose(mean(sums), float(loss.detach()), rel_tol=1e-5)
    close(decoder, gradients(one.adapters), gradients(twin.adapters))


@pytest.mark.parametrize("budget", [16, 2048])
def test_a_dpo_step_is_that_of_padded_rows(decoder: Decoder, budget: int) -> None:
    pairs, beta = pairs_of(), 0.3
    reference = answer_logprobs(made(decoder, budget, seed=5), pairs)
    one, twin = made(decoder, budget), made(decoder)
    sums = preferences(one, pairs, reference, beta, learn=True)
    logprobs, masks = padded_logprobs(decoder, twin.adapters, [row for pair in pairs for row in pair])
    policy = (logprobs * masks).sum(1).reshape(-1, 2)
    rewards = beta * (policy - torch.from_numpy(reference).float())
    loss = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
    loss.backward()
    means = {name: value / len(pairs) for name, value in sums.items()}
    assert math.isclose(means["loss"], float(loss.detach()), rel_tol=1e-4)
    margins = (rewards[:, 0] - rewards[:, 1]).detach()
    assert math.isclose(
        means["rewards/chosen"], float(rewards[:, 0].detach().mean()), rel_tol=1e-3, abs_tol=1e-4
    )
    assert math.isclose(means["rewards/margins"], float(margins.mean()), rel_tol=1e-3, abs_tol=1e-4)
    assert means["rewards/accuracies"] == float((margins > 0).float().mean())
    close(decoder, gradients(one.adapters), gradients(twin.adapters))


def test_packing_in_another_way_changes_rounding_alone(decoder: Decoder) -> None:
    rows, found = rows_of(12), []
    for budget in (1, 24, 4096):
        one = made(decoder, budget)
        sums = supervised(one, rows, learn=True)
        found.append((sums, gradients(one.adapters)))
    for sums, grads in found[1:]:
        assert math.isclose(mean(sums), mean(found[0][0]), rel_tol=1e-5)
        close(decoder, grads, found[0][1])


def test_a_held_out_loss_is_the_same_in_parts(decoder: Decoder) -> None:
    rows = rows_of(7)
    one = made(decoder)
    whole = supervised(one, rows, learn=False)
    parts = [supervised(one, part, learn=False) for part in (rows[:3], rows[3:])]
    assert sum(part["count"] for part in parts) == whole["count"]
    assert math.isclose(sum(part["loss"] for part in parts), whole["loss"], rel_tol=1e-5)
    assert not gradients(one.adapters)


def test_a_step_of_dpo_raises_the_margin(decoder: Decoder) -> None:
    pairs, one = pairs_of(), made(decoder)
    reference = answer_logprobs(one, pairs)
    before = preferences(one, pairs, reference, 0.1, learn=True)
    assert before["rewards/margins"] == 0 and math.isclose(before["loss"], 4 * math.log(2), rel_tol=1e-6)
    one.optim_step(Adam(lr=1e-3))
    after = preferences(one, pairs, reference, 0.1, learn=False)
    assert after["rewards/margins"] > 0 and after["loss"] < before["loss"]


def test_all_parameters_can_be_trained_and_vectors_do_not_decay() -> None:
    own = tiny_decoder()
    own.set_trainable(True)
    rows = rows_of()
    vectors = {name: one for name, one in own.named_parameters() if one.ndim < 2}
    one = Accumulator(own, None)
    before = {name: leaf.detach().clone() for name, leaf in own.named_parameters()}
    supervised(one, rows, learn=True)
    for leaf in own.parameters():  # what is left of the step is the decay
        leaf.grad = torch.zeros_like(leaf)
    one.optim_step(Adam(lr=0.5, weight_decay=0.1))
    changed = {name for name, leaf in own.named_parameters() if not torch.equal(leaf, before[name])}
    assert vectors and not changed & vectors.keys() and changed == before.keys() - vectors.keys()
