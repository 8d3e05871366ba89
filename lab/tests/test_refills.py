"""Refills by an autoregressive and a masked-diffusion model: what they learn from and what holds untaught."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from lab.forgetting import refills, world
from lab.forgetting.policy import Rules
from lab.forgetting.refills import END, MASK, ModelRefiller, Rows
from lab.forgetting.tokens import counter, tokenizer
from lab.forgetting.trained import remember
from ostinato.apps.memory.facts import unsupported
from ostinato.model.decoder import Decoder


@cache
def lessons() -> refills.Lessons:
    return refills.lessons(0, 3, 300)


@cache
def model() -> Decoder:
    return refills.fresh(1, hidden=32)


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, starts = max(lessons(), key=lambda one: len(one[0]))
    return tokens[:6], starts[:6]


def test_a_row_is_an_original_its_budget_and_a_canvas_of_so_many_tokens() -> None:
    made = tokenizer()
    assert [made.id_to_token(MASK), made.id_to_token(END)] == ["<|pad|>", "<|end|>"]
    for tokens, starts in lessons():
        for row, start in zip(tokens.tolist(), starts.tolist(), strict=True):
            original, _, budget = made.decode(row[: start - 1], skip_special_tokens=False).partition("<|q|>")
            canvas = row[start:]
            assert len(canvas) == int(budget) and MASK not in row
            text = canvas[: canvas.index(END)] if END in canvas else canvas
            assert set(canvas[len(text) :]) <= {END}
            words = iter(world.words_of(original))
            assert all(word in words for word in made.decode(text).split())  # in the order of the original


def test_losses_are_what_they_say_row_by_row() -> None:
    tokens, starts = drawn()
    each = []
    for row, start in zip(tokens.tolist(), starts.tolist(), strict=True):
        hidden, _ = model()(torch.tensor(row), torch.arange(len(row)), Rows(1, causal=True))
        known = model().logits(hidden).log_softmax(-1)
        stop = start + row[start:].index(END) + 1 if END in row else len(row)
        each += [-known[at - 1, row[at]].item() for at in range(start, stop)]
    loss = refills.autoregressive_loss(model(), tokens, starts, Generator())
    assert loss.item() == pytest.approx(sum(each) / len(each), rel=1e-4)

    noise, total = Generator().manual_seed(3), 0.0
    part = torch.rand(1, generator=noise)
    masked = torch.rand(tokens.shape, generator=noise)
    for at, (row, start) in enumerate(zip(tokens.tolist(), starts.tolist(), strict=True)):
        t = max(refills.LEAST_MASKED, (at + part.item()) / len(tokens))
        hide = [k >= start and masked[at, k].item() < t for k in range(len(row))]
        shown = torch.tensor([MASK if gone else token for gone, token in zip(hide, row, strict=True)])
        hidden, _ = model()(shown, torch.arange(len(row)), Rows(1, causal=False))
        known = model().logits(hidden).log_softmax(-1)
        lost = sum(-known[k, row[k]].item() for k in range(len(row)) if hide[k])
        total += lost / t / (len(row) - start)
    loss = refills.diffusion_loss(model(), tokens, starts, Generator().manual_seed(3))
    assert loss.item() == pytest.approx(total / len(tokens), rel=1e-4)


def test_what_is_kept_of_a_row_is_what_would_be_computed_again() -> None:
    tokens, cached = drawn()[0][0], refills.Cached()
    whole, _ = model()(tokens, torch.arange(len(tokens)), Rows(1, causal=True))
    parts = [model()(tokens[:5], torch.arange(5), cached)[0]]
    parts += [model()(tokens[at : at + 1], torch.tensor([at]), cached)[0] for at in range(5, len(tokens))]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(budget=st.integers(0, 12), passes=st.sampled_from([0, 1, 2, 1000]), seed=st.integers(0, 20))
def test_a_refill_is_within_its_budget_and_the_same_again(budget: int, passes: int, seed: int) -> None:
    refiller = ModelRefiller(model(), passes)
    original = world.history(seed, "eval", tokens=60).turns[0].text
    text = refiller("", original, "", budget)
    assert text == refiller("", original, "", budget)
    assert budget or not text
    assert refiller.ran["passes"] <= 2 * (min(passes, budget) if passes else budget)


@pytest.mark.parametrize("passes", [0, 1, 1000])
def test_the_gate_decides_whoever_refilled(passes: int) -> None:
    """A model that has learnt nothing writes nonsense: nothing false is left, and the budget holds."""
    count = counter(tokenizer())
    found = world.history(4, "eval", tokens=400, count=count)
    held = remember(found, Rules(budget=120), count, refiller=ModelRefiller(model(), passes))
    assert held.tokens <= 120 and held.counters["memory/wrote"] > 0
    assert not any(unsupported(text, turn.line) for turn, text in held.lines)


@pytest.mark.parametrize("loss", [refills.autoregressive_loss, refills.diffusion_loss])
def test_both_learn_and_a_seed_repeats(loss: refills.Loss) -> None:
    short = [refills.learn(refills.fresh(0, 32), loss, lessons(), 10, 4, 0) for _ in range(2)]
    values = refills.learn(refills.fresh(0, 32), loss, lessons(), 120, 8, 0)
    assert short[0] == short[1] and values[-1] < 0.8 * values[0]


def test_extracts_keep_facts_and_pass_the_gate() -> None:
    count = counter(tokenizer())
    found = [world.history(at, "eval", tokens=400, count=count) for at in range(2)]
    row = refills.judged(found, refills.extracts(), count, 4)
    assert row["unsupported"] == row["new_words"] == 0.0 and 0 < row["kept"] <= 1 and row["facts"] > 5
