"""vLLM as an engine, against a server that speaks its HTTP: the contract of every engine, and what can go
wrong."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import CONTRACT, Subject, collected
from fake_vllm import FakeVllm, decode
from reference.fake_engine import FakeEngine
from worlds import VOCAB, adapters_of, tiny_dense, tiny_moe

from ostinato.engine import vllm as vllm_engine
from ostinato.engine import vllm_policies
from ostinato.engine.local import LocalEngine
from ostinato.engine.vllm import VllmEngine
from ostinato.engine.vllm_answers import convert_answer, make_question
from ostinato.engine.vllm_proof import is_above, is_ignored
from ostinato.engine.vllm_server import check_server
from ostinato.launch.components import make_proof_row
from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.shapes import AdapterSpec
from ostinato.model.wire import fingerprint_adapters
from ostinato.observe.timeline import Kind
from ostinato.protocols import Engine
from ostinato.types import NO_EXPERT, Completion, Request, Sampling, Stop
from ostinato.workers.remote import WorkerLost


def choice(**changes: Any) -> dict[str, Any]:
    content = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
    return {
        "token_ids": [8, 9],
        "logprobs": content,
        "finish_reason": "length",
        "stop_reason": None,
    } | changes


def tiny(seed: int = 0) -> Decoder:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_dense(num_hidden_layers=1, **heads, max_position_embeddings=64, initializer_range=0.3)
    return Decoder(parse_config(config)).init_weights(seed)


DECODER = tiny()
PROBE = np.arange(5, 30, dtype=np.int32)


SPEC: dict[str, Any] = {"rank": 2, "alpha": 8.0, "targets": ("attn", "mlp")}
POLICIES = adapters_of(DECODER, 1, 0.3, **SPEC), adapters_of(DECODER, 2, 0.3, **SPEC)


def score(adapters: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        rows = torch.from_numpy(tokens.astype(np.int64))
        hidden, _ = DECODER(rows, torch.arange(len(rows)), CausalAttention(), adapters=adapters)
        logprobs = DECODER.logits(hidden[:-1]).log_softmax(-1)
    return logprobs.gather(1, rows[1:, None])[:, 0].numpy()


def is_of(completion: Completion, adapters: Any) -> None:
    """What answered ``ask()`` was sampled by this policy."""
    expected = score(adapters, np.concatenate([ask().tokens, completion.tokens]))[len(ask().tokens) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    server = FakeVllm(DECODER, decode)
    yield server
    server.close()


@pytest.fixture
def engine(server: FakeVllm, tmp_path: Path) -> VllmEngine:
    return new_engine(server, tmp_path)


def new_engine(server: Any, folder: Path, **options: Any) -> VllmEngine:
    settings = {"decode": decode, "probe": PROBE, "silence_s": 5.0, "spec": AdapterSpec(**SPEC)} | options
    return VllmEngine(server, DECODER, folder=folder, **settings)


def run(engine: Engine, *requests: Request) -> list[Completion]:
    return asyncio.run(collected(engine.generate(requests), len(requests)))


def ask(*tokens: int, **sampling: Any) -> Request:
    settings = Sampling(**{"max_tokens": 6, **sampling})
    return Request(tokens=np.array(tokens or (5, 6, 7), np.int32), sampling=settings, seed=(1, 2, 3, 4))


async def some_tokens(server: FakeVllm) -> None:
    """Wait until it is under way."""
    seen = server.sampled
    while server.sampled < seen + 3:
        await asyncio.sleep(0.001)


# ---- the contract of every engine


def subject_of(engine: Engine, **facts: Any) -> Subject:
    return Subject(engine=engine, vocab=VOCAB, policies=POLICIES, decode=decode, score=score, **facts)


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_vllm_keeps_the_contract(promise: Callable[[Subject], None], engine: VllmEngine) -> None:
    promise(subject_of(engine, answer_tokens=6))  # every token is a forward in a thread of the fake


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_the_local_engine_keeps_the_contract(promise: Callable[[Subject], None]) -> None:
    promise(subject_of(LocalEngine(DECODER, decode=decode, kv_memory_mb=4, context_limit=64)))


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_the_fake_engine_keeps_the_contract(promise: Callable[[Subject], None]) -> None:
    def logits(adapters: Any, request: Request, completion: Any) -> np.ndarray:
        near = [*request.tokens.tolist(), *completion][-1] + 31 * (adapters is POLICIES[0])
        return 2.0 * np.sin(np.arange(VOCAB) * (near + 1.0))

    if promise.__name__ != "what_can_never_be_answered_is_refused":  # it has no model to refuse for
        promise(replace(subject_of(FakeEngine(logits, decode=decode), filters=False), score=None))


# ---- publishing


async def published_under_way(engine: VllmEngine, server: FakeVllm, max_tokens: int) -> Completion:
    """An answer that runs while the second policy is published."""
    server.token_s = 0.01
    running = asyncio.create_task(collected(engine.generate([ask(max_tokens=max_tokens)]), 1))
    await some_tokens(server)
    engine.publish(POLICIES[1], 2)
    return (await running)[0]


def test_running_requests_go_on_under_the_new_adapter_and_say_from_where(
    engine: VllmEngine, server: FakeVllm
) -> None:
    engine.publish(POLICIES[0], 1)
    completion = asyncio.run(published_under_way(engine, server, 40))
    assert set(completion.versions.tolist()) == {1, 2}
    whole = np.concatenate([ask().tokens, completion.tokens])
    first, second = (score(one, whole)[len(ask().tokens) - 1 :] for one in POLICIES)
    expected = np.where(completion.versions == 1, first, second)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_request_that_began_on_the_base_ends_on_it_and_its_tokens_say_so(
    engine: VllmEngine, server: FakeVllm
) -> None:
    """vLLM has no adapter to change under it, and its label is of what others are served."""
    engine.publish(None, 1)
    completion = asyncio.run(published_under_way(engine, server, 30))
    assert (completion.versions == 1).all()
    is_of(completion, None)


def test_what_is_served_is_told_and_old_folders_go(engine: VllmEngine, tmp_path: Path) -> None:
    assert engine.served == (0, "")
    for version in range(1, 5):
        engine.publish(POLICIES[version % 2], version)
        assert engine.served == (version, fingerprint_adapters(POLICIES[version % 2]))
    assert len(list(tmp_path.glob("policy-*"))) == 2  # of now, and of requests that began before
    engine.publish(None, 5)
    assert engine.served == (5, "")


def test_policies_share_no_prefix(engine: VllmEngine, server: FakeVllm) -> None:
    engine.publish(POLICIES[0], 1)
    run(engine, ask())
    engine.publish(POLICIES[1], 2)
    run(engine, ask())
    first, second = (body["cache_salt"] for body in server.seen if body["token_ids"] == ask().tokens.tolist())
    assert first != second


def test_a_server_that_ignores_an_adapter_is_found_by_its_log_probabilities(
    engine: VllmEngine, server: FakeVllm
) -> None:
    engine.publish(POLICIES[0], 1)
    server.broken = "deaf"
    with pytest.raises(WorkerLost, match=r"k3 is [\d.]+ for policy 2 on 32 tokens|does not apply"):
        engine.publish(POLICIES[1], 2)


@pytest.mark.parametrize("kind", ["attn.q", "attn.v", "mlp.up", "mlp.down"])
def test_a_kind_of_adapter_that_is_ignored_is_named_before_any_work(
    server: FakeVllm, tmp_path: Path, kind: str
) -> None:
    """A server that leaves out what it has no module for gives the tokens of another policy, and early in a
    run, when factors are small, k3 is far below its bound."""
    server.ignored = kind
    with pytest.raises(WorkerLost, match=f"does not apply the adapters of {kind}: policy 0 is refused"):
        new_engine(server, tmp_path)


@pytest.mark.parametrize("kind", ["attn.v", "experts.down"])
def test_of_a_mixture_an_ignored_kind_is_named_too(tmp_path: Path, kind: str) -> None:
    """Before any work, by the canary, and at a publish, by factors that are as small as early in a run."""
    raw = tiny_moe(num_hidden_layers=1, max_position_embeddings=64, initializer_range=0.3)
    decoder = Decoder(parse_config(raw)).init_weights(0)
    spec: dict[str, Any] = {"rank": 2, "alpha": 8.0, "targets": ("attn", "experts")}
    policy = adapters_of(decoder, 1, 0.05, **spec)

    def start(server: FakeVllm) -> VllmEngine:
        return VllmEngine(
            server, decoder, folder=tmp_path, probe=PROBE, silence_s=5.0, spec=AdapterSpec(**spec)
        )

    deaf, sound = FakeVllm(decoder), FakeVllm(decoder)
    deaf.ignored = kind
    with pytest.raises(WorkerLost, match=f"does not apply the adapters of {kind}: policy 0"):
        start(deaf)
    engine = start(sound)
    try:
        engine.publish(policy, 1)
        sound.ignored = kind
        with pytest.raises(WorkerLost, match=f"does not apply the adapters of {kind}: policy 2"):
            engine.publish(policy, 2)
    finally:
        engine.close()


def test_a_kind_of_adapter_that_is_ignored_later_is_named_at_its_publish(
    engine: VllmEngine, server: FakeVllm
) -> None:
    server.ignored = "attn.o"
    small = adapters_of(DECODER, 1, 0.003, **SPEC)
    with pytest.raises(WorkerLost, match=r"does not apply the adapters of attn\.o: policy 1 is refused"):
        engine.publish(small, 1)


def test_only_a_certain_absence_of_a_kind_counts() -> None:
    """In bfloat16 log-probabilities are off by 0.02, and an effect as small as that is not judged."""
    generator = torch.Generator().manual_seed(0)
    noise, ours, effect = (torch.randn(32, generator=generator).double() for _ in range(3))
    without, theirs = ours - 0.2 * effect, ours + 0.02 * noise
    assert not is_ignored(theirs, ours, without) and is_ignored(without + 0.02 * noise, ours, without)
    barely = ours - 0.004 * effect
    assert not is_ignored(barely + 0.02 * noise, ours, barely)
    assert not is_ignored(theirs, ours, ours)


def test_each_publish_has_one_verdict(engine: VllmEngine) -> None:
    base = engine.take_verdict()
    assert base is not None and base.version == 0 and base.tokens == 32 and base.k3 < 1e-6
    assert engine.take_verdict() is None and make_proof_row(None) == {}
    engine.publish(POLICIES[0], 1)
    first = engine.take_verdict()
    assert first is not None and first.version == 1 and first.k3 < 1e-6
    assert make_proof_row(first) == {
        "publish/k3": first.k3,
        "publish/k3_version": 1.0,
        "publish/k3_tokens": 32.0,
    }


def test_memory_is_lent_to_a_training_step(engine: VllmEngine, server: FakeVllm) -> None:
    with pytest.raises(ZeroDivisionError), engine.lend_memory():
        assert server.lent == ["/release_kv_cache_memory"] and not server.running.is_set()
        _ = 1 / 0
    assert server.lent == ["/release_kv_cache_memory", "/wake_up"]
    engine.publish(POLICIES[0], 1)
    assert (run(engine, ask())[0].versions == 1).all()


def test_files_that_the_server_did_not_read_are_found_by_their_digest(
    engine: VllmEngine, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.publish(POLICIES[0], 1)
    monkeypatch.setattr(vllm_policies, "_compute_digest", lambda folder: "0123456789abcdef")
    with pytest.raises(WorkerLost, match="where 0123456789abcdef was written"):
        engine.publish(POLICIES[1], 2)


class Elsewhere:
    """The same server as somebody else's, who has let it go on for long."""

    def __init__(self, fake: FakeVllm) -> None:
        self.address, self.key = fake.address, fake.key

    def start(self) -> None: ...

    def why(self) -> str:
        return ""

    def close(self) -> None: ...


def test_nothing_is_sampled_between_a_new_adapter_and_its_label(server: FakeVllm, tmp_path: Path) -> None:
    """A publish was cut off when the adapter was in its place and its label was not. The server was let go on
    all the same, and tokens of the new policy had the version of the old one, in answers that were used."""

    async def cut_off() -> int:
        engine.publish(POLICIES[0], 1)
        running = asyncio.create_task(collected(engine.generate([ask(max_tokens=40)]), 1))
        await some_tokens(server)
        server.missing = {"/update_weight_version"}
        with pytest.raises(WorkerLost, match=r"lost when policy 2:.* was published: POST /update_weight"):
            engine.publish(POLICIES[1], 2)
        before = server.sampled
        await asyncio.sleep(0.05)
        running.cancel()
        return server.sampled - before

    server.start()
    engine = new_engine(Elsewhere(server), tmp_path)
    server.token_s = 0.005
    assert asyncio.run(cut_off()) == 0


def test_a_server_that_was_left_paused_is_woken(server: FakeVllm, tmp_path: Path) -> None:
    server.start()
    server.running.clear()
    assert run(new_engine(Elsewhere(server), tmp_path), ask())[0].stop is Stop.LENGTH


def test_a_refused_adapter_is_named(server: FakeVllm, tmp_path: Path) -> None:
    engine = new_engine(server, tmp_path, spec=None)
    server.missing = {"/v1/load_lora_adapter"}
    with pytest.raises(WorkerLost, match="does not take the adapter of policy 1:"):
        engine.publish(POLICIES[0], 1)


def test_a_policy_is_judged_with_its_error() -> None:
    """In bfloat16 single tokens are far apart now and then: 2 tokens of a healthy run had a k3 of 0.036."""
    rng = np.random.default_rng(0)
    healthy = np.where(rng.random(2000) < 0.02, 0.15, 0.0005).astype(np.float32)
    assert not any(is_above(healthy[n : n + 32], 0.015) for n in range(0, 1960, 32))
    assert is_above(healthy[:32] + 0.3, 0.015) and not is_above(healthy[:1] + 1, 0.015)


# ---- a server that is lost


def lost_while_it_samples(engine: VllmEngine, server: FakeVllm, how: str) -> None:
    async def struck() -> list[Completion]:
        requests = [ask(max_tokens=20) for _ in range(4)]
        running = asyncio.create_task(collected(engine.generate(requests), 4))
        await some_tokens(server)
        server.broken = how
        if how == "silent":
            server.running.clear()
        return (await asyncio.gather(running))[0]

    server.token_s = 0.01
    asyncio.run(struck())


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_server_that_is_lost_ends_the_run_by_name(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Found by its connections, or where it says nothing, by the signs of life that it does not give."""
    monkeypatch.setattr(vllm_engine, "BEAT_S", 0.02)
    engine = new_engine(server, tmp_path, silence_s=0.5 if how == "silent" else 5.0)
    with pytest.raises(
        WorkerLost, match=r"vLLM was lost while it had requests: .*; it was ordered to"
    ) as lost:
        lost_while_it_samples(engine, server, how)
    assert lost.value.final


def test_a_server_that_dies_in_a_publish_ends_the_run_by_name(engine: VllmEngine, server: FakeVllm) -> None:
    server.broken = "dead"
    with pytest.raises(WorkerLost, match=r"vLLM was lost when policy 2:.* was published"):
        engine.publish(POLICIES[1], 2)


def test_the_time_with_requests_is_drawn(engine: VllmEngine, server: FakeVllm) -> None:
    server.token_s = 0.01
    run(engine, ask())
    first, second = engine.take_spans()
    assert first.kind == Kind.START and second.kind == Kind.DECODE and second.length >= 0.05
    assert first.stop <= second.start and engine.take_spans() == []


@pytest.mark.parametrize("fault", ["restarted", "relabelled", "forgetful"])
def test_an_answer_of_another_policy_is_never_used(engine: VllmEngine, server: FakeVllm, fault: str) -> None:
    engine.publish(POLICIES[0], 1)
    if fault == "restarted":  # by somebody else, on the same address: it does not know our adapter
        server.adapter, server.label = None, "default"
    elif fault == "relabelled":
        server.adapter, server.label = POLICIES[1], "7:somebody"
    else:
        server.broken = "forgetful"
    with pytest.raises(WorkerLost, match=r"does not exist|was not published|as policy -1 where 1"):
        run(engine, ask())


def test_a_request_that_breaks_on_a_sound_server_fails_alone(engine: VllmEngine, server: FakeVllm) -> None:
    engine.publish(POLICIES[0], 1)
    server.broken = "poisoned"
    poisoned, sound = run(engine, ask(13, 14), ask())
    assert poisoned.stop is Stop.ERROR and "a kernel failed" in poisoned.error
    assert sound.stop is Stop.LENGTH


def test_a_call_that_is_given_up_closes_its_connections(engine: VllmEngine, server: FakeVllm) -> None:
    async def give_up() -> None:
        answers = engine.generate([ask(max_tokens=50), ask(max_tokens=1)])
        await anext(answers)
        await answers.aclose()  # type: ignore[attr-defined]

    server.token_s, before = 0.2, server.sampled
    asyncio.run(give_up())
    assert server.sampled < before + 50, "it waited for the answer"


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("/v1/models", "0.32 or newer"),
        ("/weight_info", "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ("/collective_rpc", "--worker-extension-cls ostinato.apps.interop.vllm_worker.Worker"),
        ("/inference/v1/generate", "0.32 or newer"),
    ],
)
def test_a_server_that_cannot_do_it_is_refused_in_words(
    server: FakeVllm, tmp_path: Path, path: str, fix: str
) -> None:
    server.missing = {path}
    with pytest.raises(ValueError, match=f"; start it with .*{fix}"):
        new_engine(server, tmp_path)


def test_a_server_with_other_weights_is_found_before_any_work(tmp_path: Path) -> None:
    server = FakeVllm(tiny(seed=1), decode)
    with pytest.raises(WorkerLost, match=r"k3 is .* for policy 0 on 32 tokens"):
        new_engine(server, tmp_path, spec=None)
    with pytest.raises(AssertionError):
        _ = server.address  # it was closed


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"temperature": 0.001}, "vLLM takes 0 .greedy. or 0.01 and more"),
        ({"min_tokens": 2, "stop_strings": ("a",)}, "drop one of them"),
    ],
)
def test_requests_that_vllm_would_answer_otherwise_are_refused(
    engine: VllmEngine, sampling: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        run(engine, ask(**sampling))
    with pytest.raises(ValueError, match="shorten the prompt"):
        run(engine, ask(*[5] * 64))


# ---- one request


def test_a_question_has_seeds_of_its_own_for_each_turn() -> None:
    first, second = make_question(ask(5), "m", "s", 64), make_question(ask(5, 6), "m", "s", 64)
    assert first["sampling_params"]["seed"] != second["sampling_params"]["seed"]
    assert all(0 <= one["sampling_params"]["seed"] < 1 << 63 for one in (first, second))
    assert (
        make_question(ask(*range(60), max_tokens=10, min_tokens=9), "m", "s", 64)["sampling_params"][
            "max_tokens"
        ]
        == 4
    )


def test_a_server_on_a_cpu_is_asked_without_seeds(server: FakeVllm, tmp_path: Path) -> None:
    """vLLM 0.32 dies there of a seeded prompt that takes two passes: "CPU Generator does not use offset"."""
    server.device = "cpu"
    run(new_engine(server, tmp_path), ask())
    assert server.seen[-1]["sampling_params"]["seed"] is None


def test_what_filters_had_kept_and_who_computed_a_token_come_with_the_answer() -> None:
    routes = np.arange(4 * 2 * 1, dtype=np.uint8).reshape(4, 2, 1)  # of the 5 tokens but the last
    buffer = io.BytesIO()
    np.save(buffer, routes)
    reported = choice(
        sampling_mask=[[9, 8], [9]], routed_experts=base64.b64encode(buffer.getvalue()).decode()
    )
    versions = np.ones(2, np.int32)
    completion = convert_answer(ask(top_k=2), reported, versions, None, num_experts=8)
    assert completion.support is not None and completion.support.ids.tolist() == [8, 9, 9]
    assert completion.prompt_experts is not None and np.array_equal(completion.prompt_experts, routes[:3])
    assert completion.experts is not None and completion.experts[0].tolist() == routes[3].tolist()
    assert (completion.experts[1] == NO_EXPERT).all()
    assert convert_answer(ask(), reported, versions, None).support is None
    with pytest.raises(ValueError, match="experts of 4 tokens for an answer that ends at 6"):
        convert_answer(ask(5, 6, 7, 8), reported, versions, None, num_experts=8)


def test_an_answer_without_log_probabilities_is_an_error() -> None:
    broken = choice(logprobs={"content": [{"logprob": -0.5}, {"logprob": -9999.0}]})
    completion = convert_answer(ask(), broken, np.ones(2, np.int32), None)
    assert completion.stop is Stop.ERROR and "not finite" in completion.error


def test_a_server_that_asks_for_another_key_is_named(server: FakeVllm) -> None:
    server.start()
    with pytest.raises(ValueError, match="requires another key; start it with the VLLM_API_KEY of this"):
        check_server(server.address, [0], "another")
