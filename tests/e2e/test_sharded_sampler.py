"""The engine over several ranks says what it says on one: the same tokens, whatever the layout.

The reference is the engine in one process. Noise is addressed and log-probabilities differ by the order of
sums alone, so in fp32 tokens are equal. Ranks are processes; one that dies, hangs or fails is named in time.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_shards import model_of, saved
from small_world import DRAFTS_PAY, NATIVE

from ostinato.engine.local import LocalEngine
from ostinato.engine.sharded import ShardedRunner, Shards, start_ranks
from ostinato.history.scripted import ScriptedDrafter
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters, AdapterSpec, init_adapters
from ostinato.model.named import SMOLLM, model_folder
from ostinato.model.wire import NotFinite, fingerprint
from ostinato.parallel.layout import Layout
from ostinato.parallel.watch import RankLost
from ostinato.types import Completion, Request, Sampling, Stop

pytestmark = pytest.mark.slow

START_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family == SMOLLM:
            try:
                return model_folder(family)
            except ValueError as error:
                pytest.skip(str(error))
        if family not in made:
            made[family] = saved(model_of(family), tmp_path_factory.mktemp(family))
        return made[family]

    return of


def started(folder: Path, layout: str, **options: Any) -> Shards:
    given = {"native": NATIVE is not None, "timeout_s": 60.0, "start_s": START_S, **options}
    return start_ranks(folder, Layout.parse(layout), **given)


@pytest.fixture
def shards(folder: Callable[[str], Path]) -> Iterator[Callable[..., Shards]]:
    """Ranks that end with the test."""
    running: list[Shards] = []

    def start(family: str, layout: str, **options: Any) -> Shards:
        running.append(started(folder(family), layout, **options))
        return running[-1]

    yield start
    for one in running:
        one.close()


OPTIONS: dict[str, Any] = {"kernels": NATIVE, "kv_memory_mb": 64, "context_limit": 96, "cost": DRAFTS_PAY}


def engine_over(shards: Shards, **options: Any) -> LocalEngine:
    return LocalEngine(shards.decoder, runner=shards.runner, **{**OPTIONS, **options})


@cache
def whole(folder: Path) -> Decoder:
    return load_model(folder)


def engine(folder: Path, **options: Any) -> LocalEngine:
    return LocalEngine(whole(folder), **{**OPTIONS, **options})


def asked(vocab: int, n: int = 5, **sampling: Any) -> list[Request]:
    """Prompts that share a beginning, with every kind of filter."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, vocab, 20)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}]
    return [
        Request(
            tokens=np.concatenate([start, rng.integers(0, vocab, 3 + 5 * i)]).astype(np.int32),
            sampling=Sampling(**{"max_tokens": 20, **kinds[i % 5], **sampling}),
            seed=(3, i),
        )
        for i in range(n)
    ]


def run(ours: LocalEngine, requests: Sequence[Request], on_token: Any = None) -> list[Completion]:
    async def collect() -> list[Completion]:
        found = {index: completion async for index, completion in ours.generate(requests, on_token)}
        return [found[i] for i in range(len(requests))]

    return asyncio.run(collect())


def adapters_of(decoder: Decoder, seed: int, strength: float = 0.05) -> Adapters:
    """That change what is said, in every part of a layer."""
    targets = ("attn", "mlp", "shared", "experts", "router") if decoder.config.moe else ("attn", "mlp")
    adapters = init_adapters(decoder.config, AdapterSpec(rank=4, targets=targets), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapters.tensors.values():
            b.normal_(0, strength, generator=generator)
    return adapters


def scenario(
    ours: LocalEngine, adapters: Sequence[Adapters], requests: Sequence[Request]
) -> tuple[list[Completion], str]:
    """One policy, and another one in flight after 30 tokens; the last fingerprint."""
    ours.publish(adapters[0], 1)
    said = [0]

    def on_token(index: int, token: int) -> None:
        said[0] += 1
        if said[0] == 30:
            ours.publish(adapters[1], 2)

    return run(ours, requests, on_token), ours.served[1]


def same(one: Completion, other: Completion, atol: float = 1e-5) -> None:
    assert one.tokens.tolist() == other.tokens.tolist() and one.stop == other.stop
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)
    assert np.array_equal(one.versions, other.versions)
    assert (one.experts is None) == (other.experts is None)
    if one.experts is not None and other.experts is not None:
        assert np.array_equal(one.experts, other.experts)
    assert (one.support is None) == (other.support is None)
    if one.support is not None and other.support is not None:
        assert np.array_equal(one.support.ids, other.support.ids)


CASES = [
    *(("qwen3_moe", layout) for layout in ("t2", "d2e2", "t2e2", "t2x2", "d2t2e2x2", "d2t2e4")),
    *(("deepseek_v3", layout) for layout in ("t2", "d2e2", "d2t2e2x2")),
    (SMOLLM, "t3"),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_ranks_say_what_one_says(
    family: str, layout: str, folder: Callable[[str], Path], shards: Callable[..., Shards]
) -> None:
    """With and without drafts, under a policy that changes in flight; routes, filters and versions too."""
    alone, ours = engine(folder(family)), engine_over(shards(family, layout))
    adapters = [adapters_of(alone.decoder, seed) for seed in (1, 2)]
    requests = asked(alone.decoder.config.vocab_size)
    expected, served = scenario(alone, adapters, requests)
    assert {1, 2} == {int(version) for one in expected for version in one.versions}
    found, proven = scenario(ours, adapters, requests)
    assert proven == served == fingerprint(adapters[1])
    # ranks add in another order: in SmolLM2 two sums in each of 30 layers, of up to 1,536 terms, whose
    # roundings (2^-24 of logits of about 10) add up like steps of a random walk
    atol = math.sqrt(2 * 30 * 1536) * 2**-24 * 10 if family == SMOLLM else 1e-5
    for one, other in zip(expected, found, strict=True):
        same(one, other, atol)
    answers = {request.seed: one.tokens for request, one in zip(requests, expected, strict=True)}

    def script(request: Request, tokens: np.ndarray) -> np.ndarray:
        return answers[request.seed][len(tokens) - len(request.tokens) :]

    for one in (alone, ours):
        one.speculation = one.speculate(ScriptedDrafter(script, length=5, tree=True), always=True)
    drafted = [scenario(one, adapters, requests)[0] for one in (alone, ours)]
    for one, other in zip(*drafted, strict=True):
        same(one, other, atol)
    assert alone.counters.accepted == ours.counters.accepted > 0


@pytest.mark.skipif(NATIVE is None, reason="torch's products depend on the number of rows")
def test_a_request_is_answered_alike_in_any_batch(shards: Callable[..., Shards]) -> None:
    """Bit for bit over four ranks too: parts are added in the order of ranks, wherever a row stands."""
    ours = engine_over(shards("qwen3_moe", "d2t2e2x2"))
    requests = asked(64)
    together = run(ours, requests)
    ours._cache.forget()
    (alone,) = run(ours, requests[3:4])
    assert np.array_equal(alone.logprobs, together[3].logprobs)
    assert np.array_equal(alone.tokens, together[3].tokens)


def test_torch_kernels_and_bf16(folder: Callable[[str], Path], shards: Callable[..., Shards]) -> None:
    """Without native kernels too; in bf16 the first tokens agree to its rounding."""
    ours = engine_over(shards("qwen3_moe", "d2t2e4", native=False), kernels=None)
    alone = engine(folder("qwen3_moe"), kernels=None)
    for one, other in zip(run(alone, asked(64)), run(ours, asked(64)), strict=True):
        same(one, other)
    half = shards("qwen3_moe", "t2e2", dtype=torch.bfloat16, fp32_head=True)
    low = LocalEngine(load_model(folder("qwen3_moe"), torch.bfloat16, fp32_head=True), **OPTIONS)
    first = asked(64, max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    agree = [
        one.tokens[0] == other.tokens[0]
        for one, other in zip(run(low, first), run(engine_over(half), first), strict=True)
    ]
    assert sum(agree) >= 4  # of 5; a near-tie may fall either way


def test_what_is_sent_is_counted(shards: Callable[..., Shards]) -> None:
    """Per pass: the vocabulary once, each of the layers' sums once, logits from all but rank 0."""
    running = shards("llama", "t2")
    ours = engine_over(running)
    running.links.traffic.taken()
    run(ours, asked(64, 1, max_tokens=1))
    layers, hidden, rows = 4, 32, 23
    assert running.links.traffic.calls["all_gather", "t"] == 1 + 2 * layers
    assert running.links.traffic.bytes["all_gather", "t"] == (1 + 2 * layers) * rows * hidden * 4
    assert running.links.traffic.bytes["gather", "t"] == 0  # rank 0 sends nothing
    runner = ours._runner
    assert isinstance(runner, ShardedRunner) and runner.published_bytes == 0
    adapters = adapters_of(ours.decoder, 1)
    ours.publish(adapters, 1)
    size = 4 * adapters.num_parameters
    assert size / 2 < runner.published_bytes < size  # its part; what is whole on both comes on top


# ---- failures


def lost(ours: LocalEngine, said: str, within_s: float) -> None:
    """One named error in time, and the same for everything after it."""
    before = time.monotonic()
    with pytest.raises(RankLost, match=said) as first:
        run(ours, asked(64, max_tokens=60))
    assert time.monotonic() - before < within_s
    for again in (lambda: run(ours, asked(64)), lambda: ours.publish(None, 9)):
        with pytest.raises(RankLost) as second:
            again()
        assert str(second.value) == str(first.value)


def pids(running: Shards) -> list[int]:
    return [one._process.pid for one in running.followers._ranks]


def test_a_rank_that_dies_is_named(shards: Callable[..., Shards]) -> None:
    running = shards("qwen3_moe", "d2t2e4")
    ours = engine_over(running)
    victim = pids(running)[1]

    def kill(index: int, token: int) -> None:
        if ours.counters.decoded > 20:
            os.kill(victim, signal.SIGKILL)

    before = time.monotonic()
    said = rf"rank 2 of the sampler \(process {victim}\) ended with signal SIGKILL"
    with pytest.raises(RankLost, match=said):
        run(ours, asked(64, max_tokens=60), kill)
    assert time.monotonic() - before < 20
    lost(ours, "rank 2 of the sampler", 1)
    assert all(one.code is not None for one in running.followers._ranks)


def test_a_rank_that_dies_at_rest_is_named(shards: Callable[..., Shards]) -> None:
    running = shards("llama", "t2")
    ours = engine_over(running)
    run(ours, asked(64))
    os.kill(pids(running)[0], signal.SIGKILL)
    lost(ours, "rank 1 of the sampler .* SIGKILL", 10)


def test_a_rank_that_hangs_is_named_within_the_limit(shards: Callable[..., Shards]) -> None:
    running = shards("llama", "t2", timeout_s=4.0)
    ours = engine_over(running)
    run(ours, asked(64))
    time.sleep(5)  # rest is not silence
    run(ours, asked(64))
    os.kill(pids(running)[0], signal.SIGSTOP)
    lost(ours, r"rank 1 of the sampler .* has not answered for 4 s, in a pass of", 12)
    assert running.followers._ranks[0].code == -signal.SIGKILL


def test_a_rank_that_fails_is_named(shards: Callable[..., Shards]) -> None:
    running = shards("llama", "t2")
    ours = engine_over(running)
    from ostinato.engine.followers import Serve

    running.followers.tell(Serve(b"not an adapter"))
    lost(ours, "rank 1 of the sampler .* raised ValueError", 10)


def test_a_broken_policy_is_not_sent(shards: Callable[..., Shards], folder: Callable[[str], Path]) -> None:
    """It is refused by name before anybody hears of it; all go on with the last."""
    ours, alone = engine_over(shards("llama", "t2")), engine(folder("llama"))
    good, bad = adapters_of(alone.decoder, 1), adapters_of(alone.decoder, 2)
    next(iter(bad.tensors.values()))[1].data[0, 0] = torch.nan
    for one in (ours, alone):
        one.publish(good, 1)
        with pytest.raises(NotFinite):
            one.publish(bad, 2)
    for one, other in zip(run(alone, asked(64)), run(ours, asked(64)), strict=True):
        same(one, other)
    with pytest.raises(ValueError, match=r"drop engine\.layout"):
        ours.publish_weights(Path("nowhere"), 3)


def test_logits_that_are_not_finite_end_one_request(tmp_path: Path) -> None:
    """As on one rank: the request is named, the others go on."""
    decoder = model_of("qwen3_moe", tie_word_embeddings=True)
    decoder.embed.data[3] = torch.nan
    running = started(saved(decoder, tmp_path), "d2e2")
    try:
        broken = Request(tokens=np.array([3], np.int32), sampling=Sampling(max_tokens=4), seed=(0,))
        (done,) = run(engine_over(running), [broken])
        assert done.stop == Stop.ERROR and "finite" in done.error
    finally:
        running.close()


ORPHANS = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_sharded_sampler as t
running = t.started(Path({folder!r}), "d2t2e4")
ours = t.engine_over(running)
t.run(ours, t.asked(64))
print(*t.pids(running), flush=True)
while True:
    t.run(ours, t.asked(64))
"""


def test_ranks_end_with_rank_0(folder: Callable[[str], Path]) -> None:
    """Killed in a pass, it leaves nobody behind."""
    code = ORPHANS.format(tests=str(Path(__file__).parent), folder=str(folder("qwen3_moe")))
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, text=True) as driver:
        assert driver.stdout is not None
        others = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(others) == 3
        driver.kill()
    deadline = time.monotonic() + 240
    while any(Path(f"/proc/{pid}").exists() for pid in others) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in others if Path(f"/proc/{pid}").exists()]
