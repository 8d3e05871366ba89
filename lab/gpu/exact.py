"""``model.exact`` on the device: alone as in any batch, trainer as sampler, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lab.gpu.sampling import answers, new_adapters, requests
from lab.gpu.training import batch_of, new_trainer, samples_of
from lab.gpu.world import DENSE, EXPERTS, Line, Lines, Raw, World
from ostinato.engine.local import LocalEngine
from ostinato.engine.paged import BLOCK, KVStore
from ostinato.engine.runner import Runner
from ostinato.model.native import Kernels, load_kernels
from ostinato.model.ops import Ops

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels

ALONE = 6  # of the requests, each in a batch of its own


def exact(world: World) -> Lines:
    """Of dense and expert models with few layers; on a CPU by the native kernels."""
    if world.on_card and world.captured is None:
        yield Line(name="model.exact", note="no Triton")
        return
    sampler, ops = _kernels(world)
    for name, raw in (("dense", DENSE), ("experts", EXPERTS)):
        decoder = world.decoder(world.raw(raw, layers=2 if world.dry else 8))
        adapters = new_adapters(decoder, 1, 0.3, rank=world.sizes.rank)
        engine = LocalEngine(
            decoder, kernels=sampler, kv_memory_mb=8 if world.dry else 2048, context_limit=256
        )
        engine.publish(adapters, 0)
        asked = requests(decoder.config.vocab_size, 8, 24, [4 if world.dry else 48] * 64)
        together = answers(engine, asked)
        apart = [answers(engine, [one])[0] for one in asked[:: 64 // ALONE]]
        same = [
            np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
            for one, other in zip(apart, together[:: 64 // ALONE], strict=True)
        ]
        yield Line(name=f"exact: alone as among 64, {name}", value=float(np.mean(same)), bar=1)
        trainer = new_trainer(world, decoder, adapters, recompute=True, ops=ops)
        batch = batch_of(samples_of(asked, together), max(world.sizes.rows, 512))
        far = max(
            float(np.abs(scored - part.logprobs).max())
            for scored, part in zip(trainer.score(batch), batch.microbatches, strict=True)
        )
        yield Line(name=f"exact: trainer and sampler, {name}", value=far, unit="nats", bar=0, most=True)
        del engine, trainer
        world.free()
        yield from _speed(world, raw, name, sampler)


def _kernels(world: World) -> tuple[CudaKernels | Kernels, Ops]:
    """Of sampler and trainer."""
    if world.captured is None:
        native = load_kernels()
        return native, native.exact
    from ostinato.model.cuda import EXACT_OPS, make_exact_training_ops

    return replace(world.captured, ops=EXACT_OPS, exact=True), make_exact_training_ops()


def _speed(world: World, raw: Raw, name: str, sampler: CudaKernels | Kernels) -> Lines:
    """A decode pass beside that of the kernels that a recipe without ``model.exact`` has."""
    rows, context = (4, 32) if world.dry else (64, 2048)
    decoder, seconds = world.decoder(world.raw(raw, layers=2 if world.dry else 8)), []
    for kernels in (world.captured or sampler, sampler):
        blocks = rows * (context // BLOCK + 1)
        store = KVStore.allocate(
            decoder.config.num_layers, blocks, decoder.kv_shape, decoder.dtype, world.device,
            by_position=world.on_card,
        )  # fmt: skip
        runner = Runner(decoder, kernels, store)
        runner.serve(new_adapters(decoder, 0, rank=world.sizes.rank))
        seconds.append(sorted(sum(runner.measure_parts(rows, context)) for _ in range(6))[2])
        del runner, store
        world.free()
    share = seconds[0] / seconds[1]
    label = f"exact: speed of a decode pass, {name}, {rows} x {context}"
    yield Line(name=label, value=share, unit="of the usual", bar=0.5, speed=True)
