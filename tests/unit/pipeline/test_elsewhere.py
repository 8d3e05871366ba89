"""The loop beside others: a trainer in a worker that is lost, sampling and training at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nouns import sample_of
from small_loop import BanditTrainer, Bench, Lesson
from worlds import KERNELS, VOCAB, tiny

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import pack
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec
from ostinato.observe.ledger import Ledger, Terms
from ostinato.observe.timeline import Kind
from ostinato.pipeline.loop import Finish, LoopState
from ostinato.threads import in_thread
from ostinato.train.remote import TrainerLink, TrainerServer
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Completion, Request, Sampling, StepReport
from ostinato.workers.remote import WorkerKind, WorkerLost


class Restorable(BanditTrainer):
    """What a trainer has to have to be made anew."""

    steps, progress = 0, 0.0

    def step(self, batch: Batch) -> StepReport:
        self.steps += 1
        return super().step(batch)

    def tensors(self) -> dict[str, Any]:
        return {"logits": self.adapters()}

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps}

    def restore(self, tensors: Any, counters: Any) -> None:
        self.logits, self.steps = tensors["logits"], counters["steps"]

    def identity(self) -> dict[str, str]:
        return {}


class Elsewhere:
    """``remote.Remote`` to such a trainer. ``dies(step)`` says whether the worker is killed when it has
    nearly done the step."""

    name = "trainer"

    def __init__(self, seconds: float, dies: Callable[[int], bool]) -> None:
        self._trainer = Restorable()
        self._trainer.seconds = seconds
        self._server, self._dies = TrainerServer(self._trainer), lambda: dies(self._trainer.steps)

    def wait(self, method: str, *arguments: Any, within_s: float) -> Any:
        answer = getattr(self._server, method)(*arguments)
        if method == "step" and self._dies():
            raise WorkerLost(WorkerKind.TRAINER, "was lost while it did step: its process ended", "trainer")
        return answer

    async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any: ...

    def kill(self) -> None: ...


def elsewhere(
    path: Path, dies: Callable[[int], bool], seconds: float = 0.0, **changes: Any
) -> tuple[Bench, TrainerLink]:
    """As a cluster has it: the loop waits in a thread, in lockstep too."""
    link = TrainerLink(Elsewhere(seconds, dies), within_s=9.0)
    bench = Bench(path, grader=Lesson(), **changes)
    bench.loop.trainer, bench.loop.worker = link, "controller"
    bench.workers.progress = lambda: link.progress
    bench.workers.trainer_consistent = lambda: True
    terms = Terms(devices=2, pools={"samplers": 1, "trainer": 1})
    bench.loop.span_sources, bench.loop.ledger = [link], Ledger(folder=bench.folder, terms=terms)

    def save(state: LoopState) -> int:
        bench.saved.append((state.to_json(), link.tensors()["logits"]))
        return state.step

    bench.loop.save = save
    return bench, link


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_loop_does_while_a_trainer_elsewhere_learns_is_to_wait(
    tmp_path: Path, overlap: bool
) -> None:
    """A step that takes longer than the watch allows was taken for one that does not end."""
    changes = {"steps": 3, "watch_s": 0.2, "overlap": overlap}
    bench, _ = elsewhere(tmp_path, lambda step: False, seconds=0.3, **changes)
    assert bench.run().why is Finish.DONE and len(bench.rows) == 3
    kinds = {row["kind"] for row in bench.folder.timeline.rows() if row["worker"] == "controller"}
    assert Kind.WAIT in kinds and Kind.TRAIN not in kinds


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_whose_trainer_is_lost_saves_its_last_step(tmp_path: Path, overlap: bool) -> None:
    """Up to ``checkpoint_every`` steps were lost with it, though the link had the state after the last."""
    bench, _ = elsewhere(tmp_path, lambda step: step == 4, steps=9, checkpoint_every=2, overlap=overlap)
    with pytest.raises(WorkerLost, match="trainer was lost while it did step"):
        bench.run()
    state, logits = bench.saved[-1]
    plain = Bench(tmp_path / "plain", grader=Lesson(), steps=9, checkpoint_every=3, overlap=overlap)
    plain.run()
    assert state["step"] == 3 and (logits == plain.saved[0][1]).all()


# ---- one process that samples and trains at once shares base tensors, kernels and their scratch between two


STEPS = 3  # of the trainer while the engine samples


class Both:
    """An engine and a trainer on one decoder."""

    def __init__(self, kernels: Kernels | None, dtype: torch.dtype) -> None:
        decoder = tiny("softmax-renormalised", dtype)
        adapters = init_adapters(decoder.config, AdapterSpec(rank=4, alpha=8), 0)
        self.trainer = PolicyTrainer(
            decoder,
            adapters,
            algorithm("grpo"),
            settings=TrainerSection(lr=1e-2, replay_threshold=0.0),
            ops=kernels.training if kernels else TORCH_OPS,
        )
        self.engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=8, context_limit=64)
        self.policy = shaken(adapters)

    async def sample(self) -> list[Completion]:
        self.engine.publish(self.policy, 0)  # which forgets the prefix tree
        sampling, rng = Sampling(max_tokens=24, top_p=0.95), np.random.default_rng(0)
        requests = [
            Request(tokens=rng.integers(0, VOCAB, 9).astype(np.int32), sampling=sampling, seed=(0, i))
            for i in range(8)
        ]
        found = {index: completion async for index, completion in self.engine.generate(requests)}
        return [found[index] for index in range(len(requests))]

    def train(self, batch: Batch) -> str:
        for _ in range(STEPS):
            self.trainer.step(batch)
        tensors = sorted(self.trainer.tensors().items())
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in tensors)).hexdigest()


def shaken(adapters: Adapters) -> Adapters:
    """A policy that is not the base."""
    copy = adapters.detach_copy()
    rng = torch.Generator().manual_seed(3)
    for tensor in copy.parameters():
        tensor.data += 0.05 * torch.randn(tensor.shape, generator=rng)
    return copy


def batch_of(answers: Sequence[Completion]) -> Batch:
    samples = [
        sample_of(
            one.tokens,
            4,
            logprobs=np.where(np.arange(len(one.tokens)) >= 4, one.logprobs, 0).astype(np.float32),
            advantages=np.full(len(one.tokens), (-1.0) ** i, np.float32),
            group=i,
        )
        for i, one in enumerate(answers)
    ]
    weights = [np.full(len(one.tokens), 1e-2, np.float32) for one in samples]
    return pack(samples, weights, tokens_per_microbatch=64, version=0)


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> bool:
    return all(
        a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_training_beside_sampling_is_one_after_the_other(kernels: Kernels | None, dtype: torch.dtype) -> None:
    turns, at_once = Both(kernels, dtype), Both(kernels, dtype)
    answers = asyncio.run(turns.sample())
    batch = batch_of(answers)
    trained = turns.train(batch)

    async def together() -> tuple[str, list[list[Completion]]]:
        training = asyncio.create_task(in_thread(lambda: at_once.train(batch)))
        sampled = [await at_once.sample()]
        while not training.done():
            sampled.append(await at_once.sample())
        return await training, sampled

    digest, sampled = asyncio.run(together())
    assert digest == trained
    assert all(same(answers, some) for some in sampled)
