"""Which dtype is fastest for a model on this machine: its matrix products, timed and cached per machine.

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
from ostinato.model.named import model_folder
from ostinato.model.native import BuildError
from ostinato.model.native import load as load_kernels
from ostinato.model.native.build import library
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.shapes import STACKED, layer_shapes

DTYPES = ("float32", "bfloat16")
SAMPLED_ROWS, TRAINED_ROWS = 16, 256  # of a product: of a decoding batch, of a microbatch
BUDGET_S = 1.0  # for all products together
ROUNDS = 5  # of each in up to ``PATIENCE`` times the budget: on a busy machine one in a few is undisturbed
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
    """All products of one token: in a forward of the engine, in a forward and backward of the trainer."""

    sampled: float
    trained: float

    @property
    def both(self) -> float:
        return self.sampled + self.trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A dtype, and why in words."""

    dtype: str
    reason: str


def choose(config: ModelConfig, *, device: str, native: bool, fp32_head: bool) -> Choice:
    """The dtype in which an RL step of the model is fastest. ``device``: "cpu" or "cuda"; ``native``: with
    the native kernels, where they can be had."""
    if device.startswith("cuda"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice(dtype="bfloat16", reason="the GPU has bf16 products")
        return Choice(dtype="float32", reason="the GPU has no bf16 products")
    measured = seconds_by_dtype(config, native=native, fp32_head=fp32_head)
    wide, narrow = measured["float32"], measured["bfloat16"]
    dtype = "bfloat16" if wide.both >= GAIN * narrow.both else "float32"
    return Choice(dtype=dtype, reason=_explain_choice(measured, dtype))


def warning(config: ModelConfig, dtype: str, *, native: bool, fp32_head: bool) -> str:
    """Why ``dtype`` is the wrong one on this processor, "" unless it is much slower than the other."""
    measured = seconds_by_dtype(config, native=native, fp32_head=fp32_head)
    other = next(name for name in DTYPES if name != dtype)
    if measured[dtype].both < MUCH_SLOWER * measured[other].both:
        return ""
    return _explain_choice(measured, other)


def _explain_choice(measured: Mapping[str, Seconds], baseline: str) -> str:
    """What the other dtype costs beside ``baseline``, and whether the processor multiplies bf16."""
    other = next(name for name in DTYPES if name != baseline)
    instructions = isa.instruction_set()
    multiplies_bf16 = "bf16" in instructions or instructions == "AMX"
    ratios = {
        "training": measured[other].trained / measured[baseline].trained,
        "sampling": measured[other].sampled / measured[baseline].sampled,
    }
    parts = [f"{_times(ratio)} in {phase}" for phase, ratio in ratios.items()]
    return (
        f"{instructions} has {'' if multiplies_bf16 else 'no '}bf16 products; {other} would be "
        f"{' and '.join(parts)}"
    )


def _times(ratio: float) -> str:
    """ "7.1x slower" of seconds that are 7.1 times the others."""
    return f"{ratio:.1f}x slower" if ratio >= 1 else f"{1 / ratio:.1f}x faster"


def seconds_by_dtype(
    config: ModelConfig,
    *,
    native: bool,
    fp32_head: bool,
    budget_s: float = BUDGET_S,
    busy: bool | None = None,
) -> dict[str, Seconds]:
    """The cached figures of this machine for these shapes; without any they are measured and cached.
    Figures of a ``busy`` machine (None: find out whether it is) are valid only while it is busy."""
    needed = products(config)
    inference, training, built = _arithmetic(native)
    file = kept_file(needed, built, fp32_head=fp32_head)
    kept = read_cached(file, parsed)
    if kept is not None and not kept.busy:
        return kept.seconds
    busy = threads.is_busy() if busy is None else busy
    if kept is not None and busy:
        return kept.seconds
    found = measure(needed, inference, training, fp32_head=fp32_head, budget_s=budget_s)
    with contextlib.suppress(OSError):  # a read-only home costs the next start a second
        tree = {"busy": busy, **{name: asdict(one) for name, one in found.items()}}
        atomic_write(file, json.dumps(tree))
    return found


def kept_file(needed: list[Product], built: str, *, fp32_head: bool) -> Path:
    """A path in the user's cache, named by a hash of all that the figures depend on. ``built``: kernels."""
    facts = (threads.fingerprint(), torch.get_num_threads(), torch.__version__, built, isa.instruction_set())
    digest = hashlib.sha256(repr((*facts, needed, fp32_head)).encode()).hexdigest()[:16]
    return cache_folder() / f"products-{digest}.json"


def _arithmetic(native: bool) -> tuple[Ops, Ops, str]:
    """(of the engine, of the trainer, what they are built from)."""
    if native:
        try:
            kernels = load_kernels()
            return kernels.ops, kernels.training, library().stem
        except BuildError:
            pass
    return TORCH_OPS, TORCH_OPS, "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the cache holds."""

    seconds: dict[str, Seconds]
    busy: bool  # the machine, while it was measured


def parsed(read: Any) -> Kept:
    """Raises ValueError, TypeError or LookupError for what was never written here."""
    if type(busy := read["busy"]) is not bool:
        raise ValueError(f"busy is {busy!r}")
    seconds = {
        name: Seconds(sampled=_positive(read[name]["sampled"]), trained=_positive(read[name]["trained"]))
        for name in DTYPES
    }
    return Kept(seconds=seconds, busy=busy)


def _positive(value: Any) -> float:
    if type(value) is not float or not 0 < value < math.inf:
        raise ValueError(f"{value!r} seconds")
    return value


def products(config: ModelConfig) -> list[Product]:
    """The distinct products of a token with frozen weights; the router's, always fp32, is left out."""
    matrices: Counter[tuple[int, int]] = Counter()
    mixtures: Counter[tuple[int, ...]] = Counter()
    for layer in range(config.num_layers):
        shapes = layer_shapes(config, layer)
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
    """Seconds of a token by dtype. The dtypes take turns, and the fastest call of each counts, so that other
    load on the machine affects both alike."""
    totals = {name: {"sampled": 0.0, "trained": 0.0} for name in DTYPES}
    share = budget_s / (2 * len(needed))
    for product in needed:
        calls = {name: _calls(product, name, inference, training, fp32_head) for name in DTYPES}
        for kind in ("sampled", "trained"):
            timed = {name: calls[name][kind] for name in DTYPES}
            for name, seconds in _fastest({n: run for n, (run, _) in timed.items()}, share).items():
                totals[name][kind] += product.count * seconds * timed[name][1]
    return {name: Seconds(**kinds) for name, kinds in totals.items()}


def _fastest(calls: Mapping[str, Callable[[], Any]], budget_s: float) -> dict[str, float]:
    """The least seconds of each, called in turns until the time is up."""
    best, rounds, begin = dict.fromkeys(calls, math.inf), 0, time.perf_counter()
    while not rounds or time.perf_counter() - begin < budget_s * (PATIENCE if rounds < ROUNDS else 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


Timed = tuple[Callable[[], Any], float]  # a call, and the factor from its seconds to those of one token


def _calls(product: Product, dtype: str, inference: Ops, training: Ops, fp32_head: bool) -> dict[str, Timed]:
    kind: torch.dtype = getattr(torch, dtype)
    if product.top_k:
        return {
            "sampled": _experts(product, kind, inference, SAMPLED_ROWS, backward=False),
            "trained": _experts(product, kind, training, TRAINED_ROWS, backward=True),
        }
    outputs, inputs = product.shape
    kept = max(16, min(outputs, MOST_ELEMENTS // inputs) // 16 * 16)
    weight, cut = _filled((kept, inputs), kind), outputs / kept
    few, many = (_filled((rows, inputs), kind) for rows in (SAMPLED_ROWS, TRAINED_ROWS))
    slopes, out_dtype = _filled((TRAINED_ROWS, kept), kind), torch.float32 if fp32_head else None
    given = (None, out_dtype) if product.is_head else ()

    def sampled() -> None:
        with torch.inference_mode():
            inference.linear(few, weight, *given)

    def trained() -> None:
        with torch.no_grad():
            training.gemm.nt(many, weight, *given)
            training.gemm.nn(slopes, weight)

    return {"sampled": (sampled, cut / SAMPLED_ROWS), "trained": (trained, cut / TRAINED_ROWS)}


def _experts(product: Product, kind: torch.dtype, ops: Ops, rows: int, *, backward: bool) -> Timed:
    """Rows dealt to experts in turn. Of many or wide experts some are measured, with as many rows each."""
    count, width, hidden = product.shape
    kept_width = max(16, min(width, MOST_EXPERT_ELEMENTS // (3 * hidden * product.top_k)) // 16 * 16)
    kept = max(product.top_k, min(count, MOST_EXPERT_ELEMENTS // (3 * hidden * kept_width)))
    rows = max(1, rows * kept // count)
    gate_up, down = _filled((kept, 2 * kept_width, hidden), kind), _filled((kept, hidden, kept_width), kind)
    ids = torch.arange(rows * product.top_k).view(rows, product.top_k) % kept
    x, weights = _filled((rows, hidden), kind), torch.full((rows, product.top_k), 1 / product.top_k)

    def forward() -> None:
        with torch.inference_mode():
            ops.experts(x, ids, weights, gate_up, down, None)

    def both() -> None:
        leaf = x.detach().requires_grad_()
        ops.experts(leaf, ids, weights, gate_up, down, None).sum().backward()

    return both if backward else forward, width / kept_width / rows


def _filled(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Neither zeros nor subnormals, which some processors multiply at another speed."""
    return torch.full(shape, 0.01, dtype=kind)


def by_threads(work: threads.Products, counts: Sequence[int]) -> list[float]:
    """Microseconds of all products of a token, sampled and trained, with each number of threads, in the dtype
    of the run or the faster one. Raises ValueError for a model that cannot be read."""
    inference, training, _ = _arithmetic(work.native)
    needed = products(read_config(model_folder(work.model)))
    times = []
    for count in counts:
        torch.set_num_threads(count)
        found = measure(needed, inference, training, fp32_head=False, budget_s=BUDGET_S)
        times.append(1e6 * min(s.both for name, s in found.items() if work.dtype in ("auto", name)))
    return times


if __name__ == "__main__":  # argv: JSON of [threads.Products, counts]; prints JSON
    given, numbers = json.loads(sys.argv[1])
    print(json.dumps(by_threads(threads.Products(**given), numbers)))
