"""How fast this machine computes, for ``ostinato doctor``: products of a model by kernels and dtype, the time
of quickstart, and what is ten times slower than it should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ostinato import isa
from ostinato.config import Recipe
from ostinato.engine import products
from ostinato.engine.threads import Threads
from ostinato.launch.dtype import resolved
from ostinato.launch.engine import new_engine
from ostinato.launch.expect import forecast
from ostinato.launch.inputs import prepare
from ostinato.launch.trainer import new_adapters, new_trainer
from ostinato.model.config import read_config
from ostinato.model.named import model_folder
from ostinato.model.native import BuildError
from ostinato.model.native import load as load_kernels
from ostinato.model.ops import TORCH_OPS, Ops

FAR = 10.0  # times slower: worth a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """GFLOP/s of a model's products with frozen weights: of a decoding batch, of a microbatch."""

    sampling: float
    training: float


Speeds = Mapping[str, Mapping[str, Speed]]  # by kernels ("native", "torch"), then by dtype


def instruction_set() -> str:
    """The name, and the cap on it where there is one."""
    cap = isa.capped()
    return isa.instruction_set() + ("" if cap == isa.NATIVE else f" ({isa.VARIABLE}={cap} caps it)")


def speeds(model: str) -> Speeds:
    """Timed now, one to two seconds each. Raises ValueError for a model that is none."""
    wanted = products.products(read_config(model_folder(model)))
    arithmetic = {"torch": (TORCH_OPS, TORCH_OPS)}
    try:
        kernels = load_kernels()
        arithmetic = {"native": (kernels.ops, kernels.training), **arithmetic}
    except BuildError:
        pass  # said beside "native kernels"
    return {name: _speeds(wanted, *ops) for name, ops in arithmetic.items()}


def _speeds(wanted: list[products.Product], inference: Ops, training: Ops) -> dict[str, Speed]:
    found = products.measure(wanted, inference, training, fp32_head=False, budget_s=products.BUDGET_S)
    giga = products.flops(wanted) / 1e9
    # of training: forward, and the gradient of the input
    return {n: Speed(sampling=giga / s.sampled, training=2 * giga / s.trained) for n, s in found.items()}


def line(dtypes: Mapping[str, Speed]) -> str:
    """By dtype, of 16 and 256 rows."""
    return "; ".join(
        f"{name} {one.sampling:.1f} GFLOP/s of {products.SAMPLED_ROWS} rows, {one.training:.1f} of "
        f"{products.TRAINED_ROWS} in training"
        for name, one in dtypes.items()
    )


def warnings(
    found: Speeds, choice: Threads, logical: int, physical: int, environ: Mapping[str, str]
) -> Iterator[str]:
    """What is ten times slower than it should be, or leaves most cores idle, each with what mends it."""
    best = found.get("native", found["torch"])
    if "native" not in found:
        yield "without native kernels sampling is several times slower: install a C++ compiler (g++)"
    for slow, fast in (("bfloat16", "float32"), ("float32", "bfloat16")):
        for what in ("sampling", "training"):
            ratio = getattr(best[fast], what) / getattr(best[slow], what)
            if ratio >= FAR:
                yield f'{what} in {slow} is {ratio:.0f}x slower than in {fast}: leave model.dtype at "auto"'
    for dtype, own in best.items():
        for what in ("sampling", "training"):
            ratio = getattr(found["torch"][dtype], what) / getattr(own, what)
            if ratio >= FAR:
                yield (
                    f"{what} by native kernels in {dtype} is {ratio:.0f}x slower than by torch's: set "
                    "engine.native=false, and report this table"
                )
    if choice.source == "environment" and 2 * choice.count <= physical:
        idle = physical - choice.count
        yield f"OMP_NUM_THREADS={choice.count} leaves {idle} of {physical} cores idle: unset it"
    if choice.count > logical:
        yield f"OMP_NUM_THREADS={choice.count} is more than the {logical} usable cores: unset it"
    if environ.get("GOMP_SPINCOUNT", "").lower() in ("infinite", "infinity"):
        yield "GOMP_SPINCOUNT=infinite keeps waiting threads on their cores: unset it"


def quickstart() -> str:
    """What the packaged recipe takes from its first evaluation to its last, and what that assumes. Raises
    ValueError."""
    recipe = resolved(Recipe.load("quickstart"))
    with prepare(recipe, training=True) as prepared:
        engine = new_engine(recipe, prepared.decoder, prepared.renderer)
        adapters = new_adapters(recipe, prepared.decoder)
        trainer = new_trainer(recipe, prepared.decoder, adapters)
        found = forecast(prepared, engine, trainer)
    assert found is not None, "the packaged recipe computes in one process"
    return f"{recipe.model.dtype}: {found}"
