"""The device that a run is on: what keys and values get of its memory, what filled it, and how fast it is.

The trainer's share is that of ``parallel.memory``: activations, gradients, optimizer, working set.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.config import Recipe
from ostinato.launch import RunFailed
from ostinato.launch.machine import device_of
from ostinato.launch.models import adapter_spec
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.named import model_folder
from ostinato.parallel.gpus import SHEETS, gpu_named, peak
from ostinato.parallel.memory import DType, Precision, Training

if TYPE_CHECKING:
    from ostinato.model.base import Base
    from ostinato.model.decoder import Decoder

logger = logging.getLogger(__name__)
LEAST_MB = 512  # of an engine that says "auto": what a small model needs, and prefixes to be found again
KEPT = 1.5e9  # bytes of a GPU that are left: context, workspaces, the sampler's own pass
PART = 0.5  # of a host's free memory that keys and values may take
SERVED = 4096  # tokens of a sequence that a GPU serves, as far as it is not known
PROMPT = 1024  # tokens of a prompt that is not known
TRAINED = ("adapters", "gradients", "optimizer", "adapter copies")  # terms that stay between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What is in a KV cache at once at most: ``prompts`` prompts with ``group`` answers each, in tokens."""

    prompts: int
    group: int
    prompt_tokens: int
    answer_tokens: int  # of all turns
    trains: bool = False  # beside a trainer on the same device

    def tokens(self, context: int, sequences: int) -> int:
        """Of at most ``sequences`` sequences of ``context`` tokens; siblings share their prompt."""
        answers = min(sequences, self.prompts * self.group)
        prompt = min(self.prompt_tokens, context)
        own = min(self.answer_tokens, context - prompt) + 16  # of the last block, a part
        return math.ceil(answers / self.group) * (prompt + 16) + answers * own


def step_need(recipe: Recipe, answer_tokens: int, prompt_tokens: int = PROMPT) -> Need:
    """Of the rollouts of training, with those that are played ahead. ``answer_tokens``: of a turn."""
    rollout = recipe.rollout
    turns = max(task.max_turns for task in recipe.task.by_name.values())
    rounds = 1 + recipe.pipeline.staleness
    return Need(
        prompts=rollout.prompts_per_step * rounds,
        group=rollout.group_size,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens * turns,
        trains=not recipe.cluster.samplers,
    )


def kv_memory_mb(recipe: Recipe, decoder: Decoder, need: Need | None = None) -> int:
    """``engine.kv_memory_mb`` with a number for "auto": LEAST_MB, or more where ``need`` asks for it and the
    device has it. A number too small for ``need`` stays, and is said. None: an engine that serves."""
    from ostinato.engine.paged import BLOCK, block_bytes

    section, context = recipe.engine, decoder.config.max_positions
    token = block_bytes(decoder.config.num_layers, decoder.kv_shape, decoder.dtype) / BLOCK
    given = section.kv_memory_mb
    if need is None:
        on_gpu = decoder.device.type == "cuda"
        least = section.max_batch * min(context, SERVED) if on_gpu else 0
        wanted = max(least, 2 * context)
    else:
        wanted = need.tokens(context, section.max_batch)
    wanted_mb = math.ceil(wanted * token / 2**20)
    if given != "auto":
        if need is not None and given < wanted_mb:
            logger.warning(
                f"engine.kv_memory_mb is {given}, room for {int((given << 20) / token):,} tokens; those "
                f'of a step have up to {wanted:,} ({wanted_mb:,} MB), so some wait: use "auto"'
            )
        return given
    room = _room_mb(recipe, decoder, trains=need is not None and need.trains)
    if room is None or wanted_mb <= max(room, LEAST_MB):
        return max(LEAST_MB, wanted_mb)
    if need is not None:
        logger.info(f"KV cache     {room:,} MB; all sequences of a step would take up to {wanted_mb:,}")
    return max(LEAST_MB, room)


def vllm_kv_memory_mb(recipe: Recipe, decoder: Decoder, need: Need | None) -> int:
    """The same for a vLLM server on this device, which has a copy of the weights besides."""
    if recipe.engine.kv_memory_mb != "auto" or decoder.device.type != "cuda":
        return kv_memory_mb(recipe, decoder, need)
    weights = sum(weight.numel() * weight.element_size() for weight in decoder.parameters()) >> 20
    room = (_room_mb(recipe, decoder, trains=True) or 0) - weights
    return max(LEAST_MB, min(kv_memory_mb(recipe, decoder, need), room))


def lends_memory(recipe: Recipe, decoder: Base) -> bool:
    """Does a sampler that the run starts on the trainer's GPU give the memory of its keys and values to each
    training step? Not on a CPU."""
    return decoder.device.type == "cuda" and _lends(recipe)


def _lends(recipe: Recipe) -> bool:
    """Not while answers go on (``pipeline.staleness``), nor elsewhere."""
    here = (
        not recipe.engine.address and not recipe.cluster.samplers and recipe.model.backend != "transformers"
    )
    return here and recipe.pipeline.staleness == 0 and not recipe.pipeline.overlap


def free_share(decoder: Decoder) -> float:
    """Of the GPU that the decoder is on, what is free, in whole hundredths; 0 on a CPU."""
    if decoder.device.type != "cuda":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info(decoder.device)
    return math.floor(100 * free / total - 1) / 100


def _room_mb(recipe: Recipe, decoder: Decoder, *, trains: bool) -> int | None:
    """What the device has left for keys and values; None where it does not say."""
    if decoder.device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(decoder.device)[0] - KEPT
        if trains:
            sizes = terms(recipe, decoder.config)
            lends = _lends(recipe)  # activations of a step come where keys and values were
            beside = TRAINED if lends else sizes.keys() - {"base weights"}
            free -= sum(size for name, size in sizes.items() if name in beside)
        return max(0, int(free)) >> 20
    free = host_memory()
    here = max(1, recipe.cluster.samplers)  # that may share this host
    return None if free is None else int(PART * free / here) >> 20


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Bytes that the host has to give; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def terms(recipe: Recipe, config: ModelConfig) -> dict[str, float]:
    """Bytes by term of a trainer that has all of the model, while it trains."""
    settings, rollout, full = recipe.trainer, recipe.rollout, recipe.adapter.kind == "full"
    dtype = DType.FP32 if recipe.model.dtype == "float32" or full else DType.BF16
    stored = {"bfloat16": DType.BF16, "int8": DType.INT8}.get(recipe.model.storage, dtype)
    answers = rollout.group_size * rollout.max_tokens  # of a prompt that goes through the layers once
    training = Training(
        config=config,
        adapter=None if full else adapter_spec(recipe.adapter),
        precision=Precision(base=stored, sampler=stored, compute=dtype, kv=dtype),
        microbatch=settings.tokens_per_microbatch,
        recompute=settings.recompute,
        trained=answers / (answers + PROMPT),
    )
    return training.fullest()[1]


def check_room(recipe: Recipe, config: ModelConfig, free: float) -> None:
    """Raises RunFailed where what no key of the trainer makes smaller, with the fewest keys and values, takes
    more than the ``free`` bytes of a GPU without weights yet. Warns where only activations do: a microbatch
    that does not fit is halved. Keys and values that are lent to a step are not there beside its activations.
    By estimate; one trainer that has all of the model."""
    given = 0 if recipe.cluster.samplers or recipe.engine.backend == "vllm" else recipe.engine.kv_memory_mb
    cache = float((LEAST_MB if given == "auto" else given) << 20)
    sizes = terms(recipe, config)
    fixed = sum(size for name, size in sizes.items() if name == "base weights" or name in TRAINED)
    activations = sum(sizes.values()) - fixed
    least = fixed + cache + KEPT
    needed = fixed + KEPT + (max(activations, cache) if _lends(recipe) else activations + cache)
    if needed > free:
        said = f"{out_of_memory(recipe, config)}; {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} free"
        if least > free:
            raise RunFailed(said)
        logger.warning(f"{said}; microbatches that do not fit are halved")


def free_memory(device: str) -> float | None:
    """Bytes of a GPU that no process has; None of a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return float(torch.cuda.mem_get_info(torch.device(device))[0])


@contextlib.contextmanager
def named_out_of_memory(recipe: Recipe, hint: str) -> Iterator[None]:
    """Raises RunFailed in place of torch's error when the device is full: what fills it, the key that helps
    most, and the ``hint``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # the errors of torch for a GPU and for a CPU
        if not is_out_of_memory(error):
            raise
        raise RunFailed(f"{out_of_memory(recipe)}; {hint}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device or of the host."""
    import torch

    said = ("can't allocate memory", "CUDA out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(one in str(error) for one in said)


def out_of_memory(recipe: Recipe, config: ModelConfig | None = None) -> str:
    """One sentence. ``config``: of the recipe's model, read where it is not given."""
    if recipe.model.backend == "transformers":
        tokens = recipe.trainer.tokens_per_microbatch
        return f"the memory is too small; lower trainer.tokens_per_microbatch ({tokens}) or engine.max_batch"
    found = terms(recipe, config or read_config(model_folder(recipe.model.path)))
    weights = found.pop("base weights", 0.0)
    trained = sum(found.pop(name, 0.0) for name in TRAINED)
    given, rows = recipe.engine.kv_memory_mb, recipe.trainer.tokens_per_microbatch
    cache = 0.0 if given == "auto" else float(given << 20)
    shares = {"weights": weights, "adapters and optimizer": trained, "activations": sum(found.values())}
    shares |= {"keys and values": cache} if cache else {}
    largest = max(shares, key=shares.__getitem__)
    fixes = {
        "weights": f"lower trainer.tokens_per_microbatch ({rows}), model.dtype=bfloat16, or a smaller model",
        "adapters and optimizer": "lower adapter.rank, or adapter.kind=lora",
        "activations": f"lower trainer.tokens_per_microbatch ({rows})",
        "keys and values": f"lower engine.kv_memory_mb ({given})",
    }
    if largest in ("weights", "activations") and not recipe.trainer.recompute:
        fixes[largest] = f"set trainer.recompute=true, or lower trainer.tokens_per_microbatch ({rows})"
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in shares.items())
    where = device_of(recipe.model)
    return f"the memory of {where} is too small; a step takes, in GB by estimate: {listed}; {fixes[largest]}"


def free_cached_memory() -> None:
    """What torch keeps of this process's GPU for later, another process can have."""
    import torch

    torch.cuda.empty_cache()


def gpu_figures(decoder: Decoder) -> dict[str, float]:
    """Metrics since the last call: the most that was allocated, and is kept for it; empty on a CPU."""
    if decoder.device.type != "cuda":
        return {}
    import torch

    most, kept = (
        size(decoder.device) / 1e9
        for size in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    )
    torch.cuda.reset_peak_memory_stats(decoder.device)
    return {"gpu/memory_peak_gb": most, "gpu/memory_kept_gb": kept}


def peak_flops(decoder: Decoder) -> float:
    """FLOP/s of bf16 by the data sheet of the GPU that the decoder is on; 0 where none is known."""
    if decoder.device.type != "cuda" or decoder.dtype.itemsize != 2:
        return 0.0
    import torch

    return sheet_flops(torch.cuda.get_device_name(decoder.device))


def sheet_flops(name: str) -> float:
    """Of a GPU by the name that its driver gives, e.g. "NVIDIA H100 80GB HBM3"; 0 for others."""
    plain = name.replace(" ", "")
    known = [key for key in SHEETS if key != "cpu" and key.rpartition("-")[0] in plain]
    return peak(gpu_named(known[0]), DType.BF16) if known else 0.0
