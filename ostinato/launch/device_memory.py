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
from ostinato.launch.machine import choose_device
from ostinato.launch.models import make_adapter_spec
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.named import find_model_folder
from ostinato.parallel.gpus import SHEETS, find_gpu, find_peak
from ostinato.parallel.memory import DType, Precision, Training

if TYPE_CHECKING:
    from ostinato.model.base import Base
    from ostinato.model.decoder import Decoder

logger = logging.getLogger(__name__)
MIN_CACHE_MB = 512  # smallest "auto" cache: what a small model needs, and room to reuse prefixes
RESERVED_BYTES = 1.5e9  # of a GPU, for CUDA's context, workspaces and the sampler's own pass
HOST_SHARE = 0.5  # of a host's free memory, for keys and values
SERVED_TOKENS = 4096  # assumed length of a served sequence
PROMPT_TOKENS = 1024  # assumed length of a prompt
RESIDENT_TERMS = ("adapters", "gradients", "optimizer", "adapter copies")  # kept between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The largest content of a KV cache: ``prompts`` prompts with ``group`` answers each."""

    prompts: int
    group: int
    prompt_tokens: int
    answer_tokens: int  # of all turns
    trains: bool = False  # a trainer is on the same device

    def count_tokens(self, context: int, sequences: int) -> int:
        """Count the tokens of at most ``sequences`` of these answers with their prompts, each sequence of at
        most ``context`` tokens. Answers to a prompt share its tokens. Blocks that are partly filled count as
        full."""
        answers = min(sequences, self.prompts * self.group)
        prompt = min(self.prompt_tokens, context)
        answer = min(self.answer_tokens, context - prompt) + 16  # 16: a partly filled last block
        return math.ceil(answers / self.group) * (prompt + 16) + answers * answer


def compute_step_need(recipe: Recipe, answer_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> Need:
    """Compute the need of the rollouts of a training step and of those that are sampled ahead.
    ``answer_tokens``: of a turn."""
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


def choose_kv_memory_mb(recipe: Recipe, decoder: Decoder, need: Need | None = None) -> int:
    """Return ``engine.kv_memory_mb``, with "auto" resolved: what ``need`` takes, or what the device has if
    that is less (then it is logged), but at least MIN_CACHE_MB. The user's number stays; if it is too small
    for ``need`` a warning is logged. ``need`` is None for a server."""
    from ostinato.engine.paged import BLOCK, count_block_bytes

    section, context = recipe.engine, decoder.config.max_positions
    token_bytes = count_block_bytes(decoder.config.num_layers, decoder.kv_shape, decoder.dtype) / BLOCK
    set_mb = section.kv_memory_mb
    if need is None:
        on_gpu = decoder.device.type == "cuda"
        batch_tokens = section.max_batch * min(context, SERVED_TOKENS) if on_gpu else 0
        num_tokens = max(batch_tokens, 2 * context)
    else:
        num_tokens = need.count_tokens(context, section.max_batch)
    needed_mb = math.ceil(num_tokens * token_bytes / 2**20)
    if set_mb != "auto":
        if need is not None and set_mb < needed_mb:
            logger.warning(
                f"engine.kv_memory_mb is {set_mb}, room for {int((set_mb << 20) / token_bytes):,} tokens; "
                f'those of a step have up to {num_tokens:,} ({needed_mb:,} MB), so some wait: use "auto"'
            )
        return set_mb
    room_mb = _measure_room_mb(recipe, decoder, trains=need is not None and need.trains)
    if room_mb is None or needed_mb <= max(room_mb, MIN_CACHE_MB):
        return max(MIN_CACHE_MB, needed_mb)
    if need is not None:
        logger.info(f"KV cache     {room_mb:,} MB; all sequences of a step would take up to {needed_mb:,}")
    return max(MIN_CACHE_MB, room_mb)


def choose_vllm_kv_memory_mb(recipe: Recipe, decoder: Decoder, need: Need | None) -> int:
    """Return ``choose_kv_memory_mb``; for "auto" on a GPU, limited to what a vLLM server leaves free with its
    second copy of the weights, but at least MIN_CACHE_MB."""
    if recipe.engine.kv_memory_mb != "auto" or decoder.device.type != "cuda":
        return choose_kv_memory_mb(recipe, decoder, need)
    weights_mb = sum(weight.numel() * weight.element_size() for weight in decoder.parameters()) >> 20
    room_mb = (_measure_room_mb(recipe, decoder, trains=True) or 0) - weights_mb
    return max(MIN_CACHE_MB, min(choose_kv_memory_mb(recipe, decoder, need), room_mb))


def lends_memory(recipe: Recipe, decoder: Base) -> bool:
    """Whether a sampler on the trainer's GPU frees the memory of its keys and values for each training step;
    False on a CPU."""
    return decoder.device.type == "cuda" and _can_lend(recipe)


def _can_lend(recipe: Recipe) -> bool:
    """Whether the recipe samples on the trainer's device and never while a step trains."""
    is_local = (
        not recipe.engine.address and not recipe.cluster.samplers and recipe.model.backend != "transformers"
    )
    return is_local and recipe.pipeline.staleness == 0 and not recipe.pipeline.overlap


def measure_free_share(decoder: Decoder) -> float:
    """Measure the free share of the memory of the decoder's GPU; rounded down to hundredths, less one; 0 on a
    CPU."""
    if decoder.device.type != "cuda":
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info(decoder.device)
    return math.floor(100 * free / total - 1) / 100


def _measure_room_mb(recipe: Recipe, decoder: Decoder, *, trains: bool) -> int | None:
    """Measure the MB for keys and values on the decoder's device, less what a trainer there will take
    (``trains``, for a GPU). On a host it is a sampler's part of HOST_SHARE. None if unknown."""
    if decoder.device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(decoder.device)[0] - RESERVED_BYTES
        if trains:
            sizes = estimate_terms(recipe, decoder.config)
            # The activations of a step reuse memory that the sampler lends.
            names = RESIDENT_TERMS if _can_lend(recipe) else sizes.keys() - {"base weights"}
            free -= sum(size for name, size in sizes.items() if name in names)
        return max(0, int(free)) >> 20
    free = read_host_memory()
    num_samplers = max(1, recipe.cluster.samplers)  # samplers that may share this host
    return None if free is None else int(HOST_SHARE * free / num_samplers) >> 20


def read_host_memory(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Read the available bytes of the host's memory; None if ``meminfo`` is missing or does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def estimate_terms(recipe: Recipe, config: ModelConfig) -> dict[str, float]:
    """Estimate the peak bytes, by term, of a trainer that holds the whole model."""
    settings, rollout, is_full = recipe.trainer, recipe.rollout, recipe.adapter.kind == "full"
    dtype = DType.FP32 if recipe.model.dtype == "float32" or is_full else DType.BF16
    stored = {"bfloat16": DType.BF16, "int8": DType.INT8}.get(recipe.model.storage, dtype)
    answers = rollout.group_size * rollout.max_tokens  # their prompt goes through the layers once
    training = Training(
        config=config,
        adapter=None if is_full else make_adapter_spec(recipe.adapter),
        precision=Precision(base=stored, sampler=stored, compute=dtype, kv=dtype),
        microbatch=settings.tokens_per_microbatch,
        recompute=settings.recompute,
        trained=answers / (answers + PROMPT_TOKENS),
    )
    return training.fullest()[1]


def check_room(recipe: Recipe, config: ModelConfig, free: float) -> None:
    """Compare the estimated memory of one trainer that holds the whole model with the ``free`` bytes of a GPU
    on which the weights are not loaded yet. Raises RunFailed if weights, optimizer and the KV cache (the
    smallest one for "auto") do not fit. Logs a warning if only activations do not fit, as the trainer then
    halves microbatches. Memory that the sampler lends counts once."""
    cache_mb = 0 if recipe.cluster.samplers or recipe.engine.backend == "vllm" else recipe.engine.kv_memory_mb
    cache = float((MIN_CACHE_MB if cache_mb == "auto" else cache_mb) << 20)
    sizes = estimate_terms(recipe, config)
    fixed = sum(size for name, size in sizes.items() if name == "base weights" or name in RESIDENT_TERMS)
    activations = sum(sizes.values()) - fixed
    resident = fixed + cache + RESERVED_BYTES
    needed = fixed + RESERVED_BYTES + (max(activations, cache) if _can_lend(recipe) else activations + cache)
    if needed > free:
        message = (
            f"{explain_out_of_memory(recipe, config)}; {needed / 1e9:.1f} GB are needed, "
            f"{free / 1e9:.1f} free"
        )
        if resident > free:
            raise RunFailed(message)
        logger.warning(f"{message}; microbatches that do not fit are halved")


def measure_free_memory(device: str) -> float | None:
    """Measure the free bytes of the GPU ``device``; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return float(torch.cuda.mem_get_info(torch.device(device))[0])


@contextlib.contextmanager
def name_out_of_memory(recipe: Recipe, hint: str) -> Iterator[None]:
    """Context that replaces an error of memory that ran out by a RunFailed, which says what fills the memory,
    the key that helps most, and the ``hint``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # the errors of torch for a GPU and for a CPU
        if not is_out_of_memory(error):
            raise
        raise RunFailed(f"{explain_out_of_memory(recipe)}; {hint}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` reports that memory of a device or of the host ran out."""
    import torch

    phrases = ("can't allocate memory", "CUDA out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        phrase in str(error) for phrase in phrases
    )


def explain_out_of_memory(recipe: Recipe, config: ModelConfig | None = None) -> str:
    """Return a sentence on what fills the memory, by estimate, and on the key that helps most. ``config``: of
    the model; None: it is read from the model's folder."""
    if recipe.model.backend == "transformers":
        tokens = recipe.trainer.tokens_per_microbatch
        return f"the memory is too small; lower trainer.tokens_per_microbatch ({tokens}) or engine.max_batch"
    sizes = estimate_terms(recipe, config or read_config(find_model_folder(recipe.model.path)))
    weights = sizes.pop("base weights", 0.0)
    resident = sum(sizes.pop(name, 0.0) for name in RESIDENT_TERMS)
    kv_memory, rows = recipe.engine.kv_memory_mb, recipe.trainer.tokens_per_microbatch
    cache = 0.0 if kv_memory == "auto" else float(kv_memory << 20)
    shares = {"weights": weights, "adapters and optimizer": resident, "activations": sum(sizes.values())}
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
    gigabytes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in shares.items())
    name = choose_device(recipe.model)
    return (
        f"the memory of {name} is too small; a step takes, in GB by estimate: {gigabytes}; {fixes[largest]}"
    )


def free_cached_memory() -> None:
    """Release the unused GPU memory that torch caches, so that another process can have it."""
    import torch

    torch.cuda.empty_cache()


def take_gpu_figures(decoder: Decoder) -> dict[str, float]:
    """Return the peaks of allocated and reserved GPU memory since the last call, in GB, and start new peaks;
    empty on a CPU."""
    if decoder.device.type != "cuda":
        return {}
    import torch

    allocated, reserved = (
        size(decoder.device) / 1e9
        for size in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    )
    torch.cuda.reset_peak_memory_stats(decoder.device)
    return {"gpu/memory_peak_gb": allocated, "gpu/memory_kept_gb": reserved}


def find_peak_flops(decoder: Decoder) -> float:
    """Return the peak bf16 FLOP/s of the decoder's GPU by its data sheet; 0 if it is unknown, on a CPU, and
    for a decoder whose dtype has not 16 bits."""
    if decoder.device.type != "cuda" or decoder.dtype.itemsize != 2:
        return 0.0
    import torch

    return find_sheet_flops(torch.cuda.get_device_name(decoder.device))


def find_sheet_flops(name: str) -> float:
    """Return the peak bf16 FLOP/s of a GPU by its driver name, e.g. "NVIDIA H100 80GB HBM3"; 0 if unknown."""
    words = re.split(r"[ -]", f"{name} {name.replace('RTX ', 'RTX')}")
    matches = [key for key in SHEETS if key.partition("-")[0] in words]
    return find_peak(find_gpu(matches[0]), DType.BF16) if matches else 0.0
