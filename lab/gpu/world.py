"""What the parts of ``lab.gpu_check`` share: lines, sizes, models with random weights, clocks."""

from __future__ import annotations

import gc
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels

ENTROPY = 2.0  # nats of a random model's next token
PEAK = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 FLOP/s of data sheets by a part of the card's name; elsewhere the measured product counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A figure and whether it is good enough. ``bar`` None: it is reported only."""

    name: str
    value: float | None = None  # None: it was not run, ``note`` says why
    unit: str = ""
    bar: float | None = None
    most: bool = False  # the bar is the most that is good, not the least
    speed: bool = False  # depends on the machine: not judged in a dry run
    note: str = ""

    def verdict(self, dry: bool) -> str:
        if self.value is None:
            return "NOT RUN"
        if self.bar is None or (dry and self.speed):
            return ""
        good = self.value <= self.bar if self.most else self.value >= self.bar
        return "PASS" if good else "FAIL"


Lines = Iterator[Line]
Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of what is run; those of a dry run show that it works, and no speed."""

    copy_mb: int = 4096
    gemm: int = 8192
    draws: int = 100_000
    vocab: int = 8192  # of the sampler's twin
    heads: tuple[int, int, int] = (32, 8, 128)  # of attention's twins
    expert_shape: tuple[int, int, int, int] = (2048, 768, 128, 8)  # hidden, width, experts, top k
    decode: tuple[tuple[int, int], ...] = ((1, 2048), (64, 512), (64, 2048), (256, 512))
    prefill: int = 8192
    ragged: tuple[int, int, int] = (128, 256, 1024)  # answers, their mean and their longest
    prompt: int = 512
    equal: tuple[int, int] = (64, 256)  # answers and tokens of each, beside transformers
    rows: int = 8192  # of a microbatch
    answers: int = 512  # short ones
    short: int = 48  # tokens of each
    rank: int = 16
    moe_layers: int = 12
    moe_rows: int = 4096
    moe_batch: int = 128
    steps: int = 60  # of quickstart


DRY = Sizes(
    copy_mb=8,
    gemm=128,
    draws=2_000,
    vocab=256,
    heads=(4, 2, 16),
    expert_shape=(32, 16, 8, 2),
    decode=((1, 32), (4, 48)),
    prefill=64,
    ragged=(6, 6, 12),
    prompt=24,
    equal=(3, 5),
    rows=96,
    answers=12,
    short=6,
    rank=8,
    moe_layers=2,
    moe_rows=64,
    moe_batch=4,
    steps=2,
)

DENSE: Raw = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}  # Qwen3-8B
EXPERTS: Raw = {
    **DENSE,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}  # Qwen3-30B-A3B
TINY: Raw = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY_EXPERTS: Raw = {**TINY, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


@dataclass(slots=True, kw_only=True)
class World:
    """The device, what was measured of it so far, and a folder for files."""

    device: torch.device
    dry: bool
    folder: Path
    copied: float = 0.0  # bytes/s of a copy, read and write
    multiplied: float = 0.0  # FLOP/s of a bf16 product
    rates: dict[str, float] = field(default_factory=dict)  # tokens a second of our rollouts
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = DRY if self.dry else Sizes()

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kernels(self) -> CudaKernels | None:
        """Those in Triton, launched one by one; None without a card: tests/unit/cuda runs them in Triton's
        interpreter."""
        if not self.on_card or importlib.util.find_spec("triton") is None:
            return None
        from ostinato.model.cuda import CudaKernels

        return CudaKernels()

    @property
    def captured(self) -> CudaKernels | None:
        """The same in graphs: what a recipe chooses."""
        if self.kernels is None:
            return None
        from ostinato.model.cuda.graphs import make_graph_factory

        return replace(self.kernels, graph=make_graph_factory())

    @property
    def sets(self) -> dict[str, CudaKernels | None]:
        """What the sampler can run on, by what a line's name begins with."""
        return {"": None} | ({"triton: ": self.kernels} if self.kernels is not None else {})

    @property
    def engines(self) -> dict[str, CudaKernels | None]:
        """``sets``, and with graphs."""
        return self.sets | ({"graphs: ": self.captured} if self.kernels is not None else {})

    @property
    def peak(self) -> float:
        """FLOP/s that utilisation is a share of."""
        name = torch.cuda.get_device_name(self.device) if self.on_card else ""
        return next((flops for part, flops in PEAK.items() if part in name), self.multiplied)

    @property
    def memory(self) -> float:
        """Bytes of the device."""
        return float(torch.cuda.mem_get_info(self.device)[1]) if self.on_card else 4e9

    def raw(self, raw: Raw, layers: int = 0) -> dict[str, Any]:
        """A config.json, tiny in a dry run; ``layers``: only so many."""
        small = TINY_EXPERTS if "num_experts" in raw else TINY
        shown = {**raw, **small} if self.dry else dict(raw)
        return shown | ({"num_hidden_layers": layers} if layers else {})

    def decoder(self, raw: Raw, seed: int = 0) -> Decoder:
        """Random weights in bf16, whose next token has about ENTROPY nats."""
        decoder = Decoder(parse_config(dict(raw)), dtype=torch.bfloat16, device=self.device, fp32_head=True)
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, weight in decoder.named_parameters():
            if weight.dim() == 1:
                weight.data.fill_(float(name.endswith("norm")))
            else:
                weight.data.normal_(0, 0.02, generator=generator)
        spread = math.sqrt(2 * max(0.5, math.log(decoder.config.vocab_size) - ENTROPY))
        decoder.head_weight.data.normal_(
            0, spread / math.sqrt(decoder.config.hidden_size), generator=generator
        )
        return decoder

    def seconds(self, work: Callable[[], object], rounds: int = 3) -> float:
        """Of one call, the median; the first one warms up."""
        work()
        found = []
        for _ in range(rounds):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - start)
        return sorted(found)[len(found) // 2]

    def wait(self) -> None:
        if self.on_card:
            torch.cuda.synchronize(self.device)

    def most_memory(self, work: Callable[[], object]) -> float:
        """Bytes that were allocated at most while ``work`` ran; 0 on a CPU."""
        if self.on_card:
            torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return float(torch.cuda.max_memory_allocated(self.device)) if self.on_card else 0.0

    def free(self) -> None:
        """Give memory of what is no longer referred to back to the device."""
        gc.collect()
        if self.on_card:
            torch.cuda.empty_cache()


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    wanted = expected.detach().double().cpu()
    return float((found.detach().double().cpu() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
