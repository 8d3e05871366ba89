"""The threads that suit the model of a recipe, and how much torch keeps of its products."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ostinato import compiler
from ostinato.config import Recipe
from ostinato.engine.threads import Products, Threads, configure_early
from ostinato.launch import backend
from ostinato.model.config import read_config
from ostinato.model.named import local_folder

DRIVER = Path("/dev/nvidiactl")  # there where NVIDIA's driver is
# oneDNN and torch each keep up to 1,024 prepared bf16 products, one for every number of rows: batches are
# packed, so hardly any comes twice, and a process that trains grows by 20 to 130 MB a step. Preparing anew
# costs 0 to 4 % of a small step (lab/studies/2026-11-24-race), and more where a decode step repeats its
# rows, which native kernels run.
CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}


def configure(recipe: Recipe) -> Threads | None:
    """Chosen, and set, before torch is imported; None, and nothing done, once it is. What the user has set
    stays. Raises ValueError for a model that is not there or of no family that is known: its products are
    what is measured."""
    section = recipe.model
    known = section.backend != "transformers"
    if (folder := local_folder(section.path)) is not None and known:
        known = section.backend == "native" or backend.chosen(folder)[0] == "native"
        if known:
            read_config(folder)
    work = Products(model=section.path, dtype=section.dtype, native=recipe.engine.native)
    on_gpu = expects_gpu(section.device, os.environ)
    chosen = configure_early(recipe.engine.threads, None if on_gpu or not known else work)
    if chosen is not None:
        keep_few(recipe.engine.native, os.environ)
        if on_gpu:  # batches of many sizes come and go: blocks of fixed sizes would leave holes
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return chosen


def expects_gpu(device: str, environ: Mapping[str, str], driver: Path = DRIVER) -> bool:
    """Whether torch, which is not imported yet, will put the model on a GPU."""
    if device != "auto":
        return device.startswith("cuda")
    try:
        without = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        without = True
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return driver.exists() and not hidden and not without


def keep_few(native: bool, environ: MutableMapping[str, str]) -> None:
    """Products of torch that hardly come twice, because ``native`` kernels run those that do."""
    for name, capacity in CACHES.items() if native and compiler.find() else ():
        environ.setdefault(name, capacity)
