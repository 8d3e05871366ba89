"""The machine of a run, and settings that depend on it: threads, device, backend and dtype.

Torch is imported only inside functions, as threads must be chosen before it is loaded.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato import __version__, compiler, isa
from ostinato.config import ModelSection, Recipe
from ostinato.engine.threads import Products, Threads, configure
from ostinato.model.config import NotNative, read_config
from ostinato.model.named import find_local_folder, find_model_folder
from ostinato.run import Jsonl, RunFolder

if TYPE_CHECKING:
    from ostinato.model.base import Base

logger = logging.getLogger(__name__)
INSTALL = 'pip install "ostinato[transformers]"'
DRIVER = Path("/dev/nvidiactl")  # exists with NVIDIA's driver
# oneDNN and torch each keep up to 1,024 prepared bf16 products, one for every number of rows: batches are
# packed, so hardly any comes twice, and a process that trains grows by 20 to 130 MB a step. Preparing anew
# costs 0 to 4 % of a small step (lab/studies/2026-11-24-race), and more where a decode step repeats its
# rows, which native kernels run.
CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}


# ---- records in the run folder


def record_start(
    run: RunFolder,
    device: str = "",
    algorithm: Mapping[str, Any] | None = None,
    train_prompts: int = 0,
    chats: bool = False,
) -> None:
    """Append a row with time, machine and versions to starts.jsonl, for reports written on other machines.
    ``device``: name of the accelerator; ``algorithm``: all of its settings, of which a recipe has only the
    user's; ``train_prompts``: their number, for which a recipe may say "all"; ``chats``: whether all are
    chats. If ``train_prompts`` is 0, neither of the last two is written."""
    row = {"at": time.time(), "machine": describe_machine(device), "versions": describe_versions()}
    row |= {"algorithm": dict(algorithm)} if algorithm else {}
    row |= {"train_prompts": train_prompts, "chats": chats} if train_prompts else {}
    Jsonl(run.path / "starts.jsonl").append(row)


def describe_machine(device: str = "") -> str:
    """Describe the machine, without host and user, as "AMD EPYC 7763, 2 cores, 7.8 GiB, Linux x86_64". The
    cores are those that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [find_processor_name(), f"{cores} cores"]
    if (size := measure_memory_gib()) is not None:
        parts.append(f"{size:.1f} GiB")
    return ", ".join([*parts, *([device] if device else []), f"{platform.system()} {platform.machine()}"])


def find_processor_name() -> str:
    """Find the processor's model name; its architecture if that is unknown."""
    lines = (line.partition(":") for line in isa.processor().splitlines())
    names = (value.strip() for key, _, value in lines if key.strip().lower() == "model name")
    return next(names, "") or platform.processor() or platform.machine()


def measure_memory_gib() -> float | None:
    """Measure the size of this machine's memory in GiB; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):  # not every system has these names
        return None


def describe_versions() -> str:
    """Describe the versions, as "ostinato 0.1.0, torch 2.13.0, Python 3.12.4"."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "missing"
    return f"ostinato {__version__}, torch {torch}, Python {platform.python_version()}"


def find_device_name(decoder: Base) -> str:
    """Return the name of the decoder's GPU; empty on a CPU."""
    import torch

    return torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else ""


# ---- threads


def configure_threads(recipe: Recipe) -> Threads:
    """Choose and set threads by the products of the model, preferably before torch is imported. Also limits
    the caches of torch's products (``limit_caches``), and for a GPU lets torch grow its blocks of memory.
    Values that the user has set stay. Raises ValueError for a model that is not on this machine or has no
    backend."""
    section = recipe.model
    is_native = section.backend != "transformers"
    if (folder := find_local_folder(section.path)) is not None and is_native:
        is_native = section.backend == "native" or choose_backend(folder)[0] == "native"
        if is_native:
            read_config(folder)
    work = Products(model=section.path, dtype=section.dtype, native=recipe.engine.native)
    on_gpu = expects_gpu(section.device, os.environ)
    limit_caches(recipe.engine.native, os.environ)
    if on_gpu:  # batches have many sizes, so blocks of fixed sizes would leave holes
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return configure(recipe.engine.threads, work=None if on_gpu or not is_native else work)


def expects_gpu(device: str, environ: Mapping[str, str], driver: Path = DRIVER) -> bool:
    """Whether the model will be on a GPU, for model.device = ``device``, judged without importing torch: by
    NVIDIA's driver, CUDA_VISIBLE_DEVICES, and the version of torch."""
    if device != "auto":
        return device.startswith("cuda")
    try:
        cpu_only = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        cpu_only = True
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return driver.exists() and not hidden and not cpu_only


def limit_caches(native: bool, environ: MutableMapping[str, str]) -> None:
    """Set environment variables that limit torch's caches of prepared products to one or none, unless they
    are set. Does nothing if ``native`` is false or there is no compiler: then the products that repeat are
    torch's own."""
    for name, capacity in CACHES.items() if native and compiler.find_compiler() else ():
        environ.setdefault(name, capacity)


# ---- device, backend, dtype


def choose_device(section: ModelSection) -> str:
    """Return the device of the model, with "auto" resolved. Raises ValueError if torch does not see it."""
    import torch

    device = section.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device is {device!r}, but torch sees no CUDA device; use auto or cpu")
    if ":" in device and int(device.partition(":")[2]) >= (count := torch.cuda.device_count()):
        raise ValueError(f"model.device is {device!r}, and torch sees {count} CUDA devices, from cuda:0 on")
    return device


def resolve_backend(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with model.backend "auto" replaced. For transformers the reason is logged, and drafts
    are switched off.

    Raises ValueError for a model that cannot be read or needs a package, and for keys that do not go with
    transformers.
    """
    if recipe.model.backend == "auto":
        name, reason = choose_backend(find_model_folder(recipe.model.path))
        if name != "native":
            logger.info(f"model.backend auto: {name}; {reason}")
        section = recipe.model.model_copy(update={"backend": name})
        recipe = recipe.model_copy(update={"model": section})
    if recipe.model.backend != "transformers":
        return recipe
    check_transformers(recipe)
    return recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"enabled": False})})


def choose_backend(folder: Path) -> tuple[str, str]:
    """Choose the backend of the model in ``folder``; returns (backend, reason). Raises ValueError for a model
    that cannot be read, or that needs transformers, which is not installed."""
    try:
        return "native", f"our decoder has the family {read_config(folder).model_type}"
    except NotNative as error:
        if find_spec("transformers") is None:
            raise ValueError(f"{error}; for any other model: {INSTALL}") from error
        return "transformers", str(error)


def check_transformers(recipe: Recipe) -> None:
    """Raises ValueError if transformers is not installed, and for keys that its models do not support."""
    if find_spec("transformers") is None:
        raise ValueError(f'model.backend is "transformers", which needs a package: {INSTALL}')
    model, engine = recipe.model, recipe.engine
    unsupported = {
        'adapter.kind "full"': (recipe.adapter.kind == "full", 'set it to "lora"'),
        f'parallel.layout "{recipe.parallel.layout}"': (
            not _divides_data(recipe.parallel.layout),
            "use d2f2, d4f4 or alike (n data ranks, each with a part of the model), or leave it empty",
        ),
        "pipeline.overlap true and a parallel.layout": (
            recipe.parallel.sharded and recipe.pipeline.overlap,
            "set it to false",
        ),
        f"cluster.samplers {recipe.cluster.samplers}": (recipe.cluster.samplers > 0, "set it to 0"),
        f'engine.backend "{engine.backend}"': (engine.backend != "local", 'set it to "local"'),
        f'engine.weights "{engine.weights}"': (engine.weights != "model", 'set it to "model"'),
        f'model.storage "{model.storage}"': (model.storage != "same", 'set it to "same"'),
        "model.exact true": (model.exact, "set it to false"),
        "model.fp32_head true": (model.fp32_head, "set it to false"),
    }
    for setting, (is_set, fix) in unsupported.items():
        if is_set:
            raise ValueError(f'model.backend is "transformers", which does not go with {setting}; {fix}')


def _divides_data(text: str) -> bool:
    """Whether a layout is one rank, or n data ranks with 1 / n of the weights each."""
    from ostinato.parallel.layout import Layout

    layout = Layout.parse(text)
    return layout == Layout(data=layout.data, shard=layout.data)


def resolve_auto(recipe: Recipe, *, run: Path | None = None, warn: bool = False) -> Recipe:
    """Return ``recipe`` with model.backend and model.dtype "auto" replaced; the reasons are logged. ``run``:
    folder of a resumed run, whose dtype stays. ``warn``: also log a warning for a dtype of the user that is
    much slower than the other one on this CPU; products are timed for it. Raises ValueError as
    ``resolve_backend``, and if torch does not see the device."""
    recipe = resolve_backend(recipe)
    model, native = recipe.model, recipe.engine.native
    if model.dtype == "auto":
        dtype = Recipe.load(RunFolder.open(run).recipe).model.dtype if run is not None else "auto"
        if dtype == "auto":
            dtype, reason = _choose_dtype(recipe)
            logger.info(f"model.dtype auto: {dtype}; {reason}")
        return recipe.model_copy(update={"model": model.model_copy(update={"dtype": dtype})})
    if warn and model.backend == "native" and recipe.adapter.kind != "full" and choose_device(model) == "cpu":
        from ostinato.engine import products

        config = read_config(find_model_folder(model.path))
        if advice := products.explain_slow_dtype(
            config, model.dtype, native=native, fp32_head=model.fp32_head
        ):
            logger.warning(f'model.dtype {model.dtype}, as written: {advice}; "auto" would choose')
    return recipe


def _choose_dtype(recipe: Recipe) -> tuple[str, str]:
    """Choose the dtype of the model; returns (dtype, reason)."""
    if recipe.adapter.kind == "full":
        return "float32", 'adapter.kind = "full" trains fp32 parameters'
    from ostinato.engine import products

    model, device = recipe.model, choose_device(recipe.model)
    if model.backend == "transformers":  # on a CPU backward of torch's own layers is fast in float32
        return ("float32" if device == "cpu" else "bfloat16"), f"a model of transformers on {device}"
    config = read_config(find_model_folder(model.path))
    choice = products.choose_dtype(
        config, device=device, native=recipe.engine.native, fp32_head=model.fp32_head
    )
    return choice.dtype, choice.reason
