"""Chooses the dtype that is fastest for a model on this machine: its matrix products, timed and cached.

    choose -> cached | measure(shapes of the model) -> seconds of a token by dtype -> Choice, with its reason

The products are those of the engine (``Ops.linear`` and ``Ops.experts`` of few rows) and of the trainer
(``Gemm.nt`` and ``nn``, and the experts under autograd, of many), by whichever kernels the run would use.
What is not a product of a frozen weight, adapters, attention and norms, costs much the same in either dtype.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato import isa
from ostinato.engine import threads
from ostinato.files import atomic_write, cache_folder, read_cached
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.named import find_model_folder
from ostinato.model.native import BuildError, load_kernels
from ostinato.model.native.build import build_kernels
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.shapes import STACKED, compute_layer_shapes

DTYPES = ("float32", "bfloat16")
SAMPLED_ROWS, TRAINED_ROWS = 16, 256  # of a product: of a decoding batch, of a microbatch
BUDGET_S = 1.0  # seconds for all products together
ROUNDS = 5  # of each in up to ``PATIENCE`` times the budget: on a busy machine few are undisturbed
PATIENCE = 4
MOST_ELEMENTS = 1 << 18  # of a measured matrix; a larger one is cut and counts in proportion
MOST_EXPERT_ELEMENTS = 1 << 23  # of all measured experts of a layer together
GAIN = 1.1  # speed-up that bfloat16 has to bring: float32 is more exact
MUCH_SLOWER = 2.0  # than the other dtype: the user is warned


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product that every token goes through ``count`` times: a matrix [N, K] or experts (E, F, D)."""

    shape: tuple[int, ...]
    count: int
    top_k: int = 0  # of experts
    is_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of all products of a token: in the engine's forward, in the trainer's forward and backward."""

    sampled: float
    trained: float

    @property
    def both(self) -> float:
        return self.sampled + self.trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A dtype, and the reason for it in words."""

    dtype: str
    reason: str


def choose_dtype(config: ModelConfig, *, device: str, native: bool, fp32_head: bool) -> Choice:
    """Return the dtype in which an RL step of the model is fastest. ``device``: "cpu" or "cuda"; ``native``:
    with the native kernels if they can be built. On a CPU the products are measured, unless cached figures
    are valid."""
    if device.startswith("cuda"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice(dtype="bfloat16", reason="the GPU has bf16 products")
        return Choice(dtype="float32", reason="the GPU has no bf16 products")
    seconds = find_seconds(config, native=native, fp32_head=fp32_head)
    fp32_seconds, bf16_seconds = seconds["float32"], seconds["bfloat16"]
    dtype = "bfloat16" if fp32_seconds.both >= GAIN * bf16_seconds.both else "float32"
    return Choice(dtype=dtype, reason=_explain_choice(seconds, dtype))


def explain_slow_dtype(config: ModelConfig, dtype: str, *, native: bool, fp32_head: bool) -> str:
    """Return why ``dtype`` is wrong on this processor; "" unless it is much slower than the other dtype."""
    seconds = find_seconds(config, native=native, fp32_head=fp32_head)
    other_dtype = next(name for name in DTYPES if name != dtype)
    if seconds[dtype].both < MUCH_SLOWER * seconds[other_dtype].both:
        return ""
    return _explain_choice(seconds, other_dtype)


def _explain_choice(seconds: Mapping[str, Seconds], baseline: str) -> str:
    """Compare the other dtype with ``baseline`` in words, and say whether the processor multiplies bf16."""
    other_dtype = next(name for name in DTYPES if name != baseline)
    instructions = isa.instruction_set()
    multiplies_bf16 = "bf16" in instructions or instructions == "AMX"
    ratios = {
        "training": seconds[other_dtype].trained / seconds[baseline].trained,
        "sampling": seconds[other_dtype].sampled / seconds[baseline].sampled,
    }
    parts = [f"{_format_ratio(ratio)} in {phase}" for phase, ratio in ratios.items()]
    return (
        f"{instructions} has {'' if multiplies_bf16 else 'no '}bf16 products; {other_dtype} would be "
        f"{' and '.join(parts)}"
    )


def _format_ratio(ratio: float) -> str:
    """Return "7.1x slower" for a ratio of seconds of 7.1."""
    return f"{ratio:.1f}x slower" if ratio >= 1 else f"{1 / ratio:.1f}x faster"


def find_seconds(
    config: ModelConfig,
    *,
    native: bool,
    fp32_head: bool,
    budget_s: float = BUDGET_S,
    busy: bool | None = None,
) -> dict[str, Seconds]:
    """Return the cached figures of this machine for these shapes; without valid ones measure, and write the
    cache. Figures of a ``busy`` machine (None: find out whether it is) are valid only while it is busy."""
    model_products = list_products(config)
    inference, training, build = _load_ops(native)
    file = cache_file(model_products, build, fp32_head=fp32_head)
    cache = read_cached(file, parse_cache)
    if cache is not None and not cache.busy:
        return cache.seconds
    busy = threads.is_busy() if busy is None else busy
    if cache is not None and busy:
        return cache.seconds
    seconds = measure(model_products, inference, training, fp32_head=fp32_head, budget_s=budget_s)
    with contextlib.suppress(OSError):  # a read-only home costs the next start a second
        tree = {"busy": busy, **{name: asdict(times) for name, times in seconds.items()}}
        atomic_write(file, json.dumps(tree))
    return seconds


def cache_file(needed: list[Product], build: str, *, fp32_head: bool) -> Path:
    """Return a path in the user's cache, by a hash of all that figures depend on; ``build``: the kernels."""
    facts = (threads.fingerprint(), torch.get_num_threads(), torch.__version__, build, isa.instruction_set())
    digest = hashlib.sha256(repr((*facts, needed, fp32_head)).encode()).hexdigest()[:16]
    return cache_folder() / f"products-{digest}.json"


def _load_ops(native: bool) -> tuple[Ops, Ops, str]:
    """Return (ops of the engine, ops of the trainer, name of the kernels' build)."""
    if native:
        try:
            kernels = load_kernels()
            return kernels.ops, kernels.training, build_kernels().stem
        except BuildError:
            pass
    return TORCH_OPS, TORCH_OPS, "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedFigures:
    """The contents of a cache file."""

    seconds: dict[str, Seconds]
    busy: bool  # whether the machine was, while it was measured


def parse_cache(read: Any) -> CachedFigures:
    """Convert a cache file. Raises ValueError, TypeError or LookupError for what was never written here."""
    if type(busy := read["busy"]) is not bool:
        raise ValueError(f"busy is {busy!r}")
    seconds = {
        name: Seconds(
            sampled=_check_positive(read[name]["sampled"]), trained=_check_positive(read[name]["trained"])
        )
        for name in DTYPES
    }
    return CachedFigures(seconds=seconds, busy=busy)


def _check_positive(value: Any) -> float:
    """Return a positive finite float. Raises ValueError for anything else."""
    if type(value) is not float or not 0 < value < math.inf:
        raise ValueError(f"{value!r} seconds")
    return value


def list_products(config: ModelConfig) -> list[Product]:
    """Return the distinct products of a token with frozen weights. The router's is left out, since it is
    always fp32."""
    matrices: Counter[tuple[int, int]] = Counter()
    mixtures: Counter[tuple[int, ...]] = Counter()
    for layer in range(config.num_layers):
        shapes = compute_layer_shapes(config, layer)
        latent = "attn.kv_a" in shapes  # without it q is a part of qkv
        for stored, members in STACKED.items():
            if stored not in ("router", "qkv" if latent else "q") and members[0] in shapes:
                matrices[sum(shapes[name][-2] for name in members), shapes[members[0]][-1]] += 1
        if "experts.gate" in shapes:
            mixtures[shapes["experts.gate"]] += 1
    top_k = config.moe.top_k if config.moe else 0
    return [
        *(Product(shape=shape, count=count) for shape, count in matrices.items()),
        *(Product(shape=shape, count=count, top_k=top_k) for shape, count in mixtures.items()),
        Product(shape=(config.vocab_size, config.hidden_size), count=1, is_head=True),
    ]


def measure(
    needed: list[Product], inference: Ops, training: Ops, *, fp32_head: bool, budget_s: float
) -> dict[str, Seconds]:
    """Measure the seconds of a token by dtype. The dtypes take turns, and the fastest call of each counts, so
    that other load on the machine affects both alike."""
    totals = {name: {"sampled": 0.0, "trained": 0.0} for name in DTYPES}
    share = budget_s / (2 * len(needed))
    for product in needed:
        calls = {name: _make_calls(product, name, inference, training, fp32_head) for name in DTYPES}
        for kind in ("sampled", "trained"):
            timings = {name: calls[name][kind] for name in DTYPES}
            for name, seconds in _time_calls({n: run for n, (run, _) in timings.items()}, share).items():
                totals[name][kind] += product.count * seconds * timings[name][1]
    return {name: Seconds(**kinds) for name, kinds in totals.items()}


def _time_calls(calls: Mapping[str, Callable[[], Any]], budget_s: float) -> dict[str, float]:
    """Return the least seconds of each call. The calls take turns until the budget is spent; up to PATIENCE
    times the budget may be spent on the first ROUNDS turns, and one is always taken."""
    least_seconds, rounds, begin_time = dict.fromkeys(calls, math.inf), 0, time.perf_counter()
    while not rounds or time.perf_counter() - begin_time < budget_s * (PATIENCE if rounds < ROUNDS else 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            least_seconds[name] = min(least_seconds[name], time.perf_counter() - start)
        rounds += 1
    return least_seconds


TimedCall = tuple[Callable[[], Any], float]  # a call, and the factor from its seconds to those of a token


def _make_calls(
    product: Product, dtype: str, inference: Ops, training: Ops, fp32_head: bool
) -> dict[str, TimedCall]:
    """Make the calls of a product by phase, on small matrices whose seconds are scaled to the product."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if product.top_k:
        return {
            "sampled": _make_expert_call(product, torch_dtype, inference, SAMPLED_ROWS, backward=False),
            "trained": _make_expert_call(product, torch_dtype, training, TRAINED_ROWS, backward=True),
        }
    outputs, inputs = product.shape
    height = max(16, min(outputs, MOST_ELEMENTS // inputs) // 16 * 16)
    weight, factor = _make_filled((height, inputs), torch_dtype), outputs / height
    few_rows, many_rows = (_make_filled((rows, inputs), torch_dtype) for rows in (SAMPLED_ROWS, TRAINED_ROWS))
    slopes, out_dtype = (
        _make_filled((TRAINED_ROWS, height), torch_dtype),
        torch.float32 if fp32_head else None,
    )
    head_args = (None, out_dtype) if product.is_head else ()

    def run_sampled() -> None:
        with torch.inference_mode():
            inference.linear(few_rows, weight, *head_args)

    def run_trained() -> None:
        with torch.no_grad():
            training.gemm.nt(many_rows, weight, *head_args)
            training.gemm.nn(slopes, weight)

    return {"sampled": (run_sampled, factor / SAMPLED_ROWS), "trained": (run_trained, factor / TRAINED_ROWS)}


def _make_expert_call(
    product: Product, kind: torch.dtype, ops: Ops, rows: int, *, backward: bool
) -> TimedCall:
    """Make the call of experts, with rows dealt to them in turn. Only some of many experts are measured, and
    only a part of wide ones, with as many rows each."""
    count, width, hidden = product.shape
    measured_width = max(16, min(width, MOST_EXPERT_ELEMENTS // (3 * hidden * product.top_k)) // 16 * 16)
    num_measured = max(product.top_k, min(count, MOST_EXPERT_ELEMENTS // (3 * hidden * measured_width)))
    rows = max(1, rows * num_measured // count)
    gate_up, down = (
        _make_filled((num_measured, 2 * measured_width, hidden), kind),
        _make_filled((num_measured, hidden, measured_width), kind),
    )
    ids = torch.arange(rows * product.top_k).view(rows, product.top_k) % num_measured
    x, weights = _make_filled((rows, hidden), kind), torch.full((rows, product.top_k), 1 / product.top_k)

    def run_forward() -> None:
        with torch.inference_mode():
            ops.experts(x, ids, weights, gate_up, down, None)

    def run_both() -> None:
        leaf = x.detach().requires_grad_()
        ops.experts(leaf, ids, weights, gate_up, down, None).sum().backward()

    return run_both if backward else run_forward, width / measured_width / rows


def _make_filled(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Fill a tensor with no zeros or subnormals, which some processors multiply at another speed."""
    return torch.full(shape, 0.01, dtype=kind)


def measure_by_threads(work: threads.Products, counts: Sequence[int]) -> list[float]:
    """Measure microseconds of all products of a token, sampled and trained, with each number of threads, in
    the dtype of the run or the faster one. The last number of threads stays set. Raises ValueError for a
    model that cannot be read."""
    inference, training, _ = _load_ops(work.native)
    model_products = list_products(read_config(find_model_folder(work.model)))
    times = []
    for count in counts:
        torch.set_num_threads(count)
        seconds = measure(model_products, inference, training, fp32_head=False, budget_s=BUDGET_S)
        times.append(
            1e6
            * min(
                product_seconds.both
                for name, product_seconds in seconds.items()
                if work.dtype in ("auto", name)
            )
        )
    return times


if __name__ == "__main__":  # argv: JSON of [threads.Products, counts]; prints JSON
    work, numbers = json.loads(sys.argv[1])
    print(json.dumps(measure_by_threads(threads.Products(**work), numbers)))
