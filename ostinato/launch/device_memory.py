"""Memory and speed of a run's device: the size of the KV cache, the terms that fill it, its peak FLOP/s.

The trainer's terms come from ``parallel.memory``: activations, gradients, optimizer, working set.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
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
from ostinato.parallel.gpus import SHEETS, find_gpu, find_peak
from ostinato.parallel.memory import DType, Precision, Training

if TYPE_CHECKING:
    from ostinato.model.base import Base
    from ostinato.model.decoder import Decoder

logger = logging.getLogger(__name__)
LEAST_MB = 512  # smallest "auto" cache: what a small model needs, and room to reuse prefixes
KEPT = 1.5e9  # reserved bytes of a GPU: CUDA context, workspaces, the sampler's own pass
PART = 0.5  # of a host's free memory that keys and values may take
SERVED = 4096  # assumed tokens of a served sequence
PROMPT = 1024  # assumed tokens of a prompt
TRAINED = ("adapters", "gradients", "optimizer", "adapter copies")  # terms that stay between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Most that a KV cache holds at once: ``prompts`` prompts with ``group`` answers each, in tokens."""

    prompts: int
    group: int
    prompt_tokens: int
    answer_tokens: int  # of all turns
    trains: bool = False  # beside a trainer on the same device

    def tokens(self, context: int, sequences: int) -> int:
        """Tokens of at most ``sequences`` sequences of ``context`` tokens; siblings share their prompt."""
        answers = min(sequences, self.prompts * self.group)
        prompt = min(self.prompt_tokens, context)
        answer = min(self.answer_tokens, context - prompt) + 16  # 16: a partly filled last block
        return math.ceil(answers / self.group) * (prompt + 16) + answers * answer


def step_need(recipe: Recipe, answer_tokens: int, prompt_tokens: int = PROMPT) -> Need:
    """Need of the rollouts of a training step, with those played ahead. ``answer_tokens``: of a turn."""
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
    """``engine.kv_memory_mb`` with "auto" resolved: what ``need`` takes, as far as the device has it, but
    LEAST_MB or more. A number too small for ``need`` stays, with a warning. ``need`` is None for a server."""
    from ostinato.engine.paged import BLOCK, count_block_bytes

    section, context = recipe.engine, decoder.config.max_positions
    size = count_block_bytes(decoder.config.num_layers, decoder.kv_shape, decoder.dtype) / BLOCK
    set_mb = section.kv_memory_mb
    if need is None:
        on_gpu = decoder.device.type == "cuda"
        least = section.max_batch * min(context, SERVED) if on_gpu else 0
        num_tokens = max(least, 2 * context)
    else:
        num_tokens = need.tokens(context, section.max_batch)
    needed_mb = math.ceil(num_tokens * size / 2**20)
    if set_mb != "auto":
        if need is not None and set_mb < needed_mb:
            logger.warning(
                f"engine.kv_memory_mb is {set_mb}, room for {int((set_mb << 20) / size):,} tokens; those "
                f'of a step have up to {num_tokens:,} ({needed_mb:,} MB), so some wait: use "auto"'
            )
        return set_mb
    room = _measure_room_mb(recipe, decoder, trains=need is not None and need.trains)
    if room is None or needed_mb <= max(room, LEAST_MB):
        return max(LEAST_MB, needed_mb)
    if need is not None:
        logger.info(f"KV cache     {room:,} MB; all sequences of a step would take up to {needed_mb:,}")
    return max(LEAST_MB, room)


def vllm_kv_memory_mb(recipe: Recipe, decoder: Decoder, need: Need | None) -> int:
    """``kv_memory_mb`` of a vLLM server on this device, which holds a second copy of the weights."""
    if recipe.engine.kv_memory_mb != "auto" or decoder.device.type != "cuda":
        return kv_memory_mb(recipe, decoder, need)
    weights = sum(weight.numel() * weight.element_size() for weight in decoder.parameters()) >> 20
    room = (_measure_room_mb(recipe, decoder, trains=True) or 0) - weights
    return max(LEAST_MB, min(kv_memory_mb(recipe, decoder, need), room))


def lends_memory(recipe: Recipe, decoder: Base) -> bool:
    """Whether a sampler on the trainer's GPU lends the memory of its keys and values to each training step;
    False on a CPU."""
    return decoder.device.type == "cuda" and _can_lend(recipe)


def _can_lend(recipe: Recipe) -> bool:
    """Whether the recipe samples on the trainer's device and never while a step trains."""
    local = (
        not recipe.engine.address and not recipe.cluster.samplers and recipe.model.backend != "transformers"
    )
    return local and recipe.pipeline.staleness == 0 and not recipe.pipeline.overlap


def free_share(decoder: Decoder) -> float:
    """Free share of the memory of the decoder's GPU, in whole hundredths less one; 0 on a CPU."""
    if decoder.device.type != "cuda":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info(decoder.device)
    return math.floor(100 * free / total - 1) / 100


def _measure_room_mb(recipe: Recipe, decoder: Decoder, *, trains: bool) -> int | None:
    """MB that the device has left for keys and values; None if unknown."""
    if decoder.device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(decoder.device)[0] - KEPT
        if trains:
            sizes = terms(recipe, decoder.config)
            lends = _can_lend(recipe)  # activations of a step reuse the lent memory
            resident = TRAINED if lends else sizes.keys() - {"base weights"}
            free -= sum(size for name, size in sizes.items() if name in resident)
        return max(0, int(free)) >> 20
    free = host_memory()
    num_samplers = max(1, recipe.cluster.samplers)  # samplers that may share this host
    return None if free is None else int(PART * free / num_samplers) >> 20


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Available bytes of the host's memory; None where ``meminfo`` does not give them."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def terms(recipe: Recipe, config: ModelConfig) -> dict[str, float]:
    """Peak bytes by term of a trainer that holds the whole model."""
    settings, rollout, full = recipe.trainer, recipe.rollout, recipe.adapter.kind == "full"
    dtype = DType.FP32 if recipe.model.dtype == "float32" or full else DType.BF16
    stored = {"bfloat16": DType.BF16, "int8": DType.INT8}.get(recipe.model.storage, dtype)
    answers = rollout.group_size * rollout.max_tokens  # their prompt goes through the layers once
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
    """Compare the estimated memory of one trainer that holds the whole model with the ``free`` bytes of a GPU
    without weights yet. Raises RunFailed where weights, optimizer and the smallest KV cache do not fit; warns
    where only activations do not, as such a microbatch is halved. Memory that is lent counts once."""
    configured = (
        0 if recipe.cluster.samplers or recipe.engine.backend == "vllm" else recipe.engine.kv_memory_mb
    )
    cache = float((LEAST_MB if configured == "auto" else configured) << 20)
    sizes = terms(recipe, config)
    fixed = sum(size for name, size in sizes.items() if name == "base weights" or name in TRAINED)
    activations = sum(sizes.values()) - fixed
    least = fixed + cache + KEPT
    needed = fixed + KEPT + (max(activations, cache) if _can_lend(recipe) else activations + cache)
    if needed > free:
        message = f"{out_of_memory(recipe, config)}; {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} free"
        if least > free:
            raise RunFailed(message)
        logger.warning(f"{message}; microbatches that do not fit are halved")


def free_memory(device: str) -> float | None:
    """Free bytes of the GPU ``device``; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return float(torch.cuda.mem_get_info(torch.device(device))[0])


@contextlib.contextmanager
def named_out_of_memory(recipe: Recipe, hint: str) -> Iterator[None]:
    """Replace torch's error of a full device by a RunFailed that says what fills it, the key that helps most,
    and the ``hint``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # the errors of torch for a GPU and for a CPU
        if not is_out_of_memory(error):
            raise
        raise RunFailed(f"{out_of_memory(recipe)}; {hint}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` reports that memory of a device or of the host ran out."""
    import torch

    phrases = ("can't allocate memory", "CUDA out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        phrase in str(error) for phrase in phrases
    )


def out_of_memory(recipe: Recipe, config: ModelConfig | None = None) -> str:
    """Sentence on what fills the memory and the key that helps most. ``config``: of the model, or None."""
    if recipe.model.backend == "transformers":
        tokens = recipe.trainer.tokens_per_microbatch
        return f"the memory is too small; lower trainer.tokens_per_microbatch ({tokens}) or engine.max_batch"
    sizes = terms(recipe, config or read_config(model_folder(recipe.model.path)))
    weights = sizes.pop("base weights", 0.0)
    trained = sum(sizes.pop(name, 0.0) for name in TRAINED)
    kv_memory, rows = recipe.engine.kv_memory_mb, recipe.trainer.tokens_per_microbatch
    cache = 0.0 if kv_memory == "auto" else float(kv_memory << 20)
    shares = {"weights": weights, "adapters and optimizer": trained, "activations": sum(sizes.values())}
    shares |= {"keys and values": cache} if cache else {}
    largest = max(shares, key=shares.__getitem__)
    fixes = {
        "weights": f"lower trainer.tokens_per_microbatch ({rows}), model.dtype=bfloat16, or a smaller model",
        "adapters and optimizer": "lower adapter.rank, or adapter.kind=lora",
        "activations": f"lower trainer.tokens_per_microbatch ({rows})",
        "keys and values": f"lower engine.kv_memory_mb ({kv_memory})",
    }
    if largest in ("weights", "activations") and not recipe.trainer.recompute:
        fixes[largest] = f"set trainer.recompute=true, or lower trainer.tokens_per_microbatch ({rows})"
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in shares.items())
    name = device_of(recipe.model)
    return f"the memory of {name} is too small; a step takes, in GB by estimate: {listed}; {fixes[largest]}"


def free_cached_memory() -> None:
    """Release the unused GPU memory that torch caches, so that another process can have it."""
    import torch

    torch.cuda.empty_cache()


def gpu_figures(decoder: Decoder) -> dict[str, float]:
    """Metrics since the last call, in GB: peak allocated and peak reserved memory; empty on a CPU."""
    if decoder.device.type != "cuda":
        return {}
    import torch

    allocated, reserved = (
        size(decoder.device) / 1e9
        for size in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    )
    torch.cuda.reset_peak_memory_stats(decoder.device)
    return {"gpu/memory_peak_gb": allocated, "gpu/memory_kept_gb": reserved}


def peak_flops(decoder: Decoder) -> float:
    """Peak bf16 FLOP/s of the decoder's GPU by its data sheet; 0 if unknown, or not a 16-bit decoder."""
    if decoder.device.type != "cuda" or decoder.dtype.itemsize != 2:
        return 0.0
    import torch

    return sheet_flops(torch.cuda.get_device_name(decoder.device))


def sheet_flops(name: str) -> float:
    """Peak bf16 FLOP/s of a GPU by its driver name, e.g. "NVIDIA H100 80GB HBM3"; 0 if unknown."""
    words = re.split(r"[ -]", f"{name} {name.replace('RTX ', 'RTX')}")
    matches = [key for key in SHEETS if key.partition("-")[0] in words]
    return find_peak(find_gpu(matches[0]), DType.BF16) if matches else 0.0
