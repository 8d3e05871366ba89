"""Gradients that add up call by call: against autograd over every row alone, and their laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding, terms_of
from worlds import KERNELS, VOCAB, adapters_of, tiny_decoder

from ostinato.algo.token_losses import TokenLoss, token_loss
from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.train.accumulate import Accumulator, Adam, NotFinite, Row

IS, CE = token_loss("importance_sampling"), token_loss("cross_entropy")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


def rows_of(siblings: int = 3, groups: int = 2, seed: int = 0) -> list[Row]:
    """Answers of different lengths to common prompts, as an RL client sends them."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        prompt = rng.integers(0, VOCAB, 5 + group)
        for sibling in range(siblings):
            whole = np.concatenate([prompt, rng.integers(0, VOCAB, 1 + 3 * sibling)])
            trained = np.arange(1, len(whole)) >= len(prompt)
            logprobs = np.where(trained, rng.normal(-4, 0.3, len(trained)), 0).astype("f4")
            advantages = np.where(trained, rng.normal(), 0).astype("f4")
            values = {"logprobs": logprobs, "advantages": advantages}
            rows.append(Row(tokens=whole[:-1].astype(np.int32), targets=whole[1:], values=values))
    return rows


def made(decoder: Decoder, seed: int = 0, kernels: Kernels | None = None, budget: int = 2048) -> Accumulator:
    ops = kernels.training if kernels else TORCH_OPS
    return Accumulator(decoder, adapters_of(decoder, seed), ops=ops, tokens_per_microbatch=budget)


def gradients(one: Accumulator) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}": leaf.grad.clone()
        for name, pair in one.adapters.tensors.items()
        for part, leaf in zip("AB", pair, strict=True)
        if leaf.grad is not None
    }


def by_hand(decoder: Decoder, adapters: Adapters, rows: Sequence[Row], loss: TokenLoss) -> list[np.ndarray]:
    """Row by row, whole logits, plain autograd."""
    found = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        hidden, _ = decoder(tokens, torch.arange(len(tokens)), CausalAttention(), adapters=adapters)
        log_p = torch.log_softmax(decoder.logits(hidden).float(), -1)
        targets = torch.from_numpy(row.targets.reshape(len(tokens), -1))
        logprobs = log_p.gather(1, targets).reshape(-1)
        values = {name: torch.from_numpy(one.reshape(-1)) for name, one in row.values.items()}
        loss(logprobs, values).backward()
        found.append(logprobs.detach().numpy().reshape(row.targets.shape))
    return found


def close(decoder: Decoder, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    bound = rounding(torch.float32, 4 * terms_of(decoder.config, 64), 1.0)
    for name, grad in one.items():
        scale = max(1.0, float(other[name].abs().max()))
        assert float((grad - other[name]).abs().max()) <= bound * scale, name


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("budget", [16, 2048])
def test_log_probabilities_and_gradients_are_those_of_rows_alone(
    decoder: Decoder, kernels: Kernels | None, budget: int
) -> None:
    rows, one, twin = rows_of(), made(decoder, kernels=kernels, budget=budget), made(decoder)
    scored = one.forward_backward(rows, IS)
    wanted = by_hand(decoder, twin.adapters, rows, IS)
    for have, want in zip(scored.logprobs, wanted, strict=True):
        assert np.abs(have - want).max() < 1e-4
    close(decoder, gradients(one), gradients(twin))


def test_several_targets_of_a_position_are_a_soft_label(decoder: Decoder) -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, VOCAB, 6).astype(np.int32)
    values = {"weights": rng.random((6, 3)).astype("f4")}
    rows = [Row(tokens=tokens, targets=rng.integers(0, VOCAB, (6, 3)), values=values)]
    one, twin = made(decoder), made(decoder)
    scored = one.forward_backward(rows, CE)
    (want,) = by_hand(decoder, twin.adapters, rows, CE)
    assert scored.logprobs[0].shape == (6, 3) and np.abs(scored.logprobs[0] - want).max() < 1e-4
    close(decoder, gradients(one), gradients(twin))


def test_calls_add_up_to_one_call_in_any_order(decoder: Decoder) -> None:
    rows = rows_of(groups=3)
    whole, cut, turned = made(decoder), made(decoder), made(decoder)
    total = whole.forward_backward(rows, IS).loss
    parts = [rows[:2], rows[2:3], rows[3:]]
    losses = [cut.forward_backward(part, IS).loss for part in parts]
    for part in reversed(parts):
        turned.forward_backward(part, IS)
    assert math.isclose(sum(losses), total, rel_tol=1e-4)
    close(decoder, gradients(cut), gradients(whole))
    close(decoder, gradients(turned), gradients(whole))


def test_forward_gives_the_same_bits_and_no_gradient(decoder: Decoder) -> None:
    rows, one = rows_of(), made(decoder)
    read = one.forward(rows, IS)
    assert not gradients(one)
    learned = one.forward_backward(rows, IS)
    assert read.loss == learned.loss
    assert all(np.array_equal(a, b) for a, b in zip(read.logprobs, learned.logprobs, strict=True))


def test_two_adapters_in_turn_get_what_each_gets_alone(decoder: Decoder) -> None:
    """Bit for bit: they share the base and nothing else."""

    def steps(one: Accumulator, seed: int) -> None:
        one.forward_backward(rows_of(seed=seed), IS)
        one.optim_step(Adam(lr=1e-2))

    alone = [made(decoder, seed) for seed in (1, 2)]
    together = [made(decoder, seed) for seed in (1, 2)]
    for seed, one in enumerate(alone):
        for turn in range(3):
            steps(one, 10 * seed + turn)
    for turn in range(3):
        for seed, one in enumerate(together):
            steps(one, 10 * seed + turn)
    for one, other in zip(alone, together, strict=True):
        have, want = other.tensors(), one.tensors()
        assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)


def test_a_step_is_torchs_adamw_and_forgets_the_gradients(decoder: Decoder) -> None:
    one, twin = made(decoder), made(decoder)
    leaves = [leaf for pair in twin.adapters.tensors.values() for leaf in pair]
    optimizer = torch.optim.AdamW(leaves, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    adam = Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    for seed in range(2):
        for each in (one, twin):
            each.forward_backward(rows_of(seed=seed), IS)
        norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        assert one.optim_step(adam)["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        assert not gradients(one)
    wanted = twin.adapters.state_dict()
    assert all(
        torch.allclose(have, wanted[name], atol=1e-5) for name, have in one.adapters.state_dict().items()
    )
    before = {name: tensor.clone() for name, tensor in one.tensors().items()}
    one.optim_step(adam)  # nothing has added up
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.tensors().items())


def test_a_restored_one_goes_on_bit_for_bit(decoder: Decoder) -> None:
    one, other, fresh = made(decoder), made(decoder, 3), made(decoder, 4)
    one.forward_backward(rows_of(), IS)
    one.optim_step(Adam(lr=1e-2))
    kept = {name: tensor.clone() for name, tensor in one.tensors().items()}
    other.forward_backward(rows_of(seed=9), IS)  # is gone with the restore
    other.restore(kept)
    fresh.restore(kept, optimizer=False)
    for each in (one, other, fresh):
        each.forward_backward(rows_of(seed=1), IS)
        each.optim_step(Adam(lr=1e-2))
    want = one.tensors()
    assert all(torch.equal(tensor, want[name]) for name, tensor in other.tensors().items())
    assert not all(torch.equal(tensor, want[name]) for name, tensor in fresh.tensors().items())


def weighted(weight: float) -> list[Row]:
    return [
        Row(tokens=r.tokens, targets=r.targets, values={"weights": np.full(r.targets.shape, weight, "f4")})
        for r in rows_of()
    ]


def test_gradients_that_are_not_finite_are_refused_and_gone(decoder: Decoder) -> None:
    """A loss that was not finite was returned as a number, and its gradients kept until the step."""
    one = made(decoder)
    before = {name: tensor.clone() for name, tensor in one.tensors().items()}
    with pytest.raises(NotFinite, match="not finite"):
        one.forward_backward(weighted(3e38), CE)
    assert not gradients(one)
    one.forward_backward(weighted(1e25), CE)
    with pytest.raises(NotFinite, match="nothing was learned"):
        one.optim_step(Adam())
    assert not gradients(one)
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("learning_rate", {"lr": 1e308}),
        ("learning_rate", {"lr": float("nan")}),
        ("eps", {"eps": 0.0}),
        ("weight_decay", {"lr": 1.0, "weight_decay": 1e30}),
    ],
)
def test_a_step_that_ends_in_numbers_that_are_not_finite_is_refused(
    name: str, changes: dict[str, float]
) -> None:
    """A learning rate of 1e308 was learned with, and the adapter of NaN that it left was saved."""
    with pytest.raises(ValueError, match=name):
        Adam(**changes)  # type: ignore[arg-type]


def test_the_largest_step_leaves_finite_numbers(decoder: Decoder) -> None:
    one = made(decoder)
    one.forward_backward(weighted(1e10), CE)
    one.optim_step(Adam(lr=1e3, eps=1e-30, weight_decay=1e-3))
    assert all(torch.isfinite(tensor).all() for tensor in one.tensors().values())


def row(**changes: object) -> Row:
    usual = {"tokens": np.arange(3, dtype=np.int32), "targets": np.arange(3), "values": {}}
    return Row(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": np.arange(0, dtype=np.int32)}, "has no tokens"),
        ({"targets": np.arange(4)}, r"target_tokens of shape \[4\] for 3 tokens"),
        ({"values": {"weights": np.ones(2)}}, r"weights of shape \[2\] where target_tokens has \[3\]"),
        ({"values": {"advantages": np.array([1, np.nan, 1])}}, "a number in advantages that is not finite"),
    ],
)
def test_a_row_that_is_none_is_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        row(**changes)


@pytest.mark.parametrize(
    ("rows", "loss", "sentence"),
    [
        ([row()], IS, "datum 0 has no logprobs, which importance_sampling needs"),
        (
            [row(values={"advantages": np.ones(3)})],
            CE,
            "datum 0 has advantages, which cross_entropy does not",
        ),
        ([row(), row(tokens=np.array([0, 99, 1], np.int32))], CE, "datum 1 has the token 99 in input"),
        ([row(targets=np.array([0, -1, 1]))], CE, "datum 0 has the token -1 in target_tokens"),
        ([row(values={"weights": np.ones(3)}), row()], CE, "datum 1 has other inputs than datum 0"),
        (
            [row(tokens=np.zeros(600, np.int32), targets=np.zeros(600, int))],
            CE,
            "600 tokens and the context is 512",
        ),
    ],
)
def test_rows_are_refused_by_number_before_any_work(
    decoder: Decoder, rows: list[Row], loss: TokenLoss, sentence: str
) -> None:
    one = made(decoder)
    with pytest.raises(ValueError, match=sentence):
        one.forward_backward(rows, loss)
    assert not gradients(one)


def test_an_error_in_a_later_microbatch_takes_back_the_gradients_before_it(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, real, calls = made(decoder, budget=16), Accumulator._learn_part, []

    def broken(self: Accumulator, *given: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no memory")
        return real(self, *given)

    for had in (False, True):
        if had:
            one.forward_backward(rows_of(seed=1), IS)
        before = gradients(one)
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Accumulator, "_learn_part", broken)
            with pytest.raises(RuntimeError, match="no memory"):
                one.forward_backward(rows_of(), IS)
        after = gradients(one)
        assert len(calls) == 2 and after.keys() == before.keys() and bool(after) == had
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
