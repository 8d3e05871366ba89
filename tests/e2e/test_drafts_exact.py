"""Speculation on or off, the tokens are the same: on real models, whatever is drafted.

The drafts range from the answer itself to lies; the settings over temperatures, filters, stop tokens that
fall inside a draft, lengths that end inside one, and a KV pool so small that sequences are preempted with
drafts in flight. With native kernels every row is computed by itself, so "the same" is bit for bit,
log-probabilities too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from five_tokens import chi_square, counted, greedy_by_count_ratio, ratio_against_the_old
from reference.scripted import ScriptedDrafter
from worlds import DRAFTS_PAY, NATIVE, answers, tiny_dense
from worlds import same as same_answer

from ostinato.engine.local import LocalEngine
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.store import History
from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import init_adapters
from ostinato.model.named import find_model_folder
from ostinato.model.shapes import AdapterSpec
from ostinato.protocols import Drafter
from ostinato.render import Renderer
from ostinato.types import Completion, HistoryEntry, Request, Sampling, Stop

QUESTIONS = ("What is 716 + 471?", "What is 23 * 7?", "12 + 8 - 5 + 30 = ?")


@cache
def model(name: str, dtype: torch.dtype) -> tuple[Decoder, Renderer]:
    folder = find_model_folder(name)
    return load_model(folder, dtype=dtype, device="cpu", fp32_head=True), Renderer(folder)


def engine(
    name: str, dtype: torch.dtype, drafter: Drafter | None, native: bool = True, **options
) -> LocalEngine:
    decoder, renderer = model(name, dtype)
    given = {"kv_memory_mb": 64, "context_limit": 256, "cost": DRAFTS_PAY, **options}
    return LocalEngine(
        decoder, kernels=NATIVE if native else None, decode=renderer.decode, drafter=drafter, **given
    )


def requests(name: str, sampling: Sampling, siblings: int = 3, seed: int = 0) -> list[Request]:
    renderer = model(name, torch.float32)[1]
    prompts = [renderer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [
        Request(tokens=np.array(ids, np.int32), sampling=sampling, seed=(seed, n, k), uid=f"q{n}")
        for n, ids in enumerate(prompts)
        for k in range(siblings)
    ]


def pasts(requested: Sequence[Request], done: Sequence[Completion]) -> dict[str, list[HistoryEntry]]:
    by_uid: dict[str, list[HistoryEntry]] = {}
    for request, completion in zip(requested, done, strict=True):
        assert completion.edges is not None
        past = HistoryEntry(
            context=request.tokens[-8:],
            tokens=completion.tokens,
            probs=np.exp(completion.logprobs),
            edges=completion.edges,
            reward=float(len(completion.tokens) % 2),
        )
        by_uid.setdefault(request.uid, []).append(past)
    return by_uid


def history_of(past: dict[str, list[HistoryEntry]], rotate: int = 0) -> History:
    """``rotate``: every prompt gets another one's answers."""
    history, uids = History(), sorted(past)
    for n, uid in enumerate(uids):
        history.add(uids[(n + rotate) % len(uids)], 1, past[uid])
    return history


def scripted(kind: str, requested: Sequence[Request], done: Sequence[Completion]) -> ScriptedDrafter:
    """Drafts that need no history: right, random, or wrong on purpose where it hurts most."""
    answers = {r.seed: np.concatenate([r.tokens, c.tokens]) for r, c in zip(requested, done, strict=True)}
    rng = np.random.default_rng(5)

    def script(request: Request, tokens: np.ndarray) -> np.ndarray:
        truth = answers[request.seed][len(tokens) : len(tokens) + 8]
        if kind == "random":
            return rng.integers(0, 290, 8)
        if kind == "adversarial":  # right until the last moment, then wrong; and text after a stop token
            lie = truth.copy()
            if len(lie):
                lie[rng.integers(len(lie)) :] = 7
            return lie if len(lie) else np.full(4, 7)
        return np.concatenate([truth, np.full(4, 9)])  # on and on beyond the end of the answer

    return ScriptedDrafter(script, length=8)


SAMPLINGS = {"plain": {}, "top_p": {"top_p": 0.8}, "top_k": {"top_k": 3}, "min_p": {"min_p": 0.1}}
SETTINGS = {(0.0, "plain"): "slow", (0.6, "top_p"): "slow", (0.6, "min_p"): "lab", (1.0, "plain"): "lab"}
KINDS = ("history", "live", "random", "adversarial", "oracle", "another prompt's")


def drafter_of(kind: str, requested: Sequence[Request], done: Sequence[Completion]) -> Drafter:
    if kind in ("random", "adversarial", "oracle"):
        return scripted(kind, requested, done)
    if kind == "live":
        return HistoryDrafter(None)
    return HistoryDrafter(history_of(pasts(requested, done), rotate=kind != "history"))


def same(plain: Sequence[Completion], drafted: Sequence[Completion]) -> None:
    for one, other in zip(plain, drafted, strict=True):
        same_answer(one, other)


@pytest.mark.skipif(NATIVE is None, reason="bit for bit needs the native kernels")
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        (1.0, "top_k"),
        *(pytest.param(*setting, marks=getattr(pytest.mark, mark)) for setting, mark in SETTINGS.items()),
    ],
)
def test_tokens_do_not_depend_on_drafts(temperature: float, filters: str) -> None:
    renderer = model("asset:seed-moe", torch.float32)[1]
    for stop in ((), renderer.stop_tokens):
        sampling = Sampling(
            temperature=temperature, max_tokens=28, min_tokens=3, stop_tokens=stop, **SAMPLINGS[filters]
        )
        requested = requests("asset:seed-moe", sampling)
        plain = answers(engine("asset:seed-moe", torch.float32, None), requested)
        for kind in KINDS:
            drafter = drafter_of(kind, requested, plain)
            ours = engine("asset:seed-moe", torch.float32, drafter, max_batch=4)
            same(plain, answers(ours, requested))
            if kind == "oracle":
                assert ours.counters.accepted > 2 * ours.counters.passes
                assert stop or all(c.stop == Stop.LENGTH for c in plain)
            tight = engine("asset:seed-moe", torch.float32, drafter_of(kind, requested, plain), max_batch=6)
            tight._scheduler.cache = type(tight._scheduler.cache)(11)
            same(plain, answers(tight, requested))
            if kind == "oracle" and not stop:
                assert tight.counters.preempted > 0


@pytest.mark.skipif(NATIVE is None, reason="bit for bit needs the native kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_inside_a_draft(kind: str) -> None:
    sampling = Sampling(max_tokens=40, stop_strings=("####", "= "))
    requested = requests("asset:seed-moe", sampling)
    plain = answers(engine("asset:seed-moe", torch.float32, None), requested)
    assert any(c.stop == Stop.STRING for c in plain)
    same(
        plain, answers(engine("asset:seed-moe", torch.float32, drafter_of(kind, requested, plain)), requested)
    )


@pytest.mark.skipif(NATIVE is None, reason="bit for bit needs the native kernels")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.lab)])
def test_a_pretrained_model(dtype: torch.dtype) -> None:
    try:
        model("smollm2-135m", dtype)
    except ValueError as error:
        pytest.skip(str(error))
    for temperature, kind in ((1.0, "history"), (0.6, "oracle"), (0.0, "adversarial")):
        requested = requests("smollm2-135m", Sampling(temperature=temperature, max_tokens=24), siblings=2)
        plain = answers(engine("smollm2-135m", dtype, None), requested)
        same(plain, answers(engine("smollm2-135m", dtype, drafter_of(kind, requested, plain)), requested))


# ---- the law, on a real engine


def tiny_world() -> Decoder:
    sizes = {"vocab_size": 5, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tiny_dense(**sizes, intermediate_size=24, max_position_embeddings=32, initializer_range=0.6)
    return Decoder(parse_config(config)).init_weights(3)


PROMPT = (1, 2, 3, 4, 0, 1, 2, 3)


def next_token(decoder: Decoder, prefix: Sequence[int], adapters=None) -> np.ndarray:
    with torch.inference_mode():
        row = torch.tensor(list(prefix))
        hidden, _ = decoder(row, torch.arange(len(row)), CausalAttention(), adapters=adapters)
        return decoder.logits(hidden[-1:])[0].double().softmax(-1).numpy()


def table(decoder: Decoder, adapters=None) -> Callable[[tuple[int, ...]], np.ndarray]:
    return cache(lambda prefix: next_token(decoder, (*PROMPT, *prefix), adapters))


def drawn(
    decoder: Decoder, drafter: Drafter | None, n: int, step: int, adapters=None
) -> list[tuple[int, ...]]:
    ours = LocalEngine(
        decoder, kernels=NATIVE, kv_memory_mb=8, context_limit=16, drafter=drafter, cost=DRAFTS_PAY
    )
    ours.publish(adapters, 1)
    sampling = Sampling(max_tokens=3)
    requested = [
        Request(tokens=np.array(PROMPT, np.int32), sampling=sampling, seed=(step, k), uid="w")
        for k in range(n)
    ]
    return [tuple(c.tokens.tolist()) for c in answers(ours, requested)]


@pytest.mark.slow
def test_chi_square_at_30000_draws_passes_and_two_published_rules_fail() -> None:
    """Drafts from an adversarial history: what an older policy wrote, rarest answers first, with the noise in
    the drafter's hand. SPEC-RL's min(1, p / q) and the greedy count ratio draw from the same policies."""
    decoder, n = tiny_world(), 30000
    old = init_adapters(decoder.config, AdapterSpec(rank=4), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, b in old.tensors.values():
            b.normal_(0, 0.3, generator=generator)
    p_of, q_of = table(decoder), table(decoder, old)
    everything = list(itertools.product(range(5), repeat=3))
    p = {a[:d]: p_of(a[:d]) for a in everything for d in range(3)}
    q = {a[:d]: q_of(a[:d]) for a in everything for d in range(3)}
    exact = np.array([np.prod([p[a[:d]][a[d]] for d in range(3)]) for a in everything])
    rare = sorted(everything, key=lambda a: exact[everything.index(a)])[:40]
    past = [
        HistoryEntry(
            context=np.array(PROMPT, np.int32),
            tokens=np.array(a, np.int32),
            probs=np.array([q[a[:d]][a[d]] for d in range(3)], np.float32),
            edges=np.array([q[a[:d]][: a[d]].sum() for d in range(3)], np.float32),
            reward=1.0,
        )
        for a in rare
    ]
    history = History()
    history.add("w", 0, past)
    drafted = HistoryDrafter(history)
    statistic, point = chi_square(counted(drawn(decoder, drafted, n, 1)), exact)
    assert statistic < point
    assert sum(drafted.stats().drafted.values()) > n / 10, "the history was not drafted from"
    rng = np.random.default_rng(2)
    behaviour = np.array([np.prod([q[a[:d]][a[d]] for d in range(3)]) for a in everything])
    olds = [everything[i] for i in rng.choice(len(everything), size=n, p=behaviour / behaviour.sum())]
    for wrong in (
        [ratio_against_the_old(p, q, a, rng) for a in olds],
        [greedy_by_count_ratio(p, q, rng) for _ in range(n)],
    ):
        statistic, point = chi_square(counted(wrong), exact)
        assert statistic > point
