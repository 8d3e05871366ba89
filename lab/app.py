"""``ostinato bench NAME``: a table for people, one JSON object for machines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise

from lab.harness import Bench, main
from ostinato.engine import threads

BENCHES = {
    "rollouts": ("rollouts:Rollouts", "tokens per second: ostinato, vLLM, transformers, matrix products"),
    "decode": ("decode:Decode", "one decode step by part, against its matrix products"),
    "adapters": ("adapters:Adapters", "a decode pass with rows of 64 adapters, against a single adapter"),
    "side": ("side:Side", "runs side by side on one base, against one after the other: seconds and memory"),
    "weights": ("weights:WeightsBeside", "engine.weights side by side (decode --weights)"),
    "products": ("products:Products", "matrix products of our kernels and of torch"),
    "serve": ("serve:Serve", "streaming clients at our server and at vLLM's: tokens per second, latencies"),
    "serve-catalog": (
        "serve_catalog:ServeCatalog",
        "clients at many policies (serve --catalog)",
    ),
    "catalog": ("catalog:CatalogBench", "a catalog of 100,000 policies: memory, look-ups, loads, leaks"),
    "train": ("train:Train", "seconds of a GRPO step: ostinato, and TRL in its fastest setting"),
    "train-sft": ("train_sft:TrainSft", "tokens per second of SFT, and TRL's SFTTrainer (train --sft)"),
    "race": ("race.bench:Race", "a race to equal score against TRL: seconds, FLOPs and memory to get there"),
    "quickstart": ("quickstart:Quickstart", "whole runs of a recipe: seconds from start to report, scores"),
    "draft": ("draft:Draft", "rollouts with drafts from history, of siblings alone, and without"),
    "vllm-drafts": ("vllm_drafts:VllmDrafts", "draft methods inside vLLM, ours among its own"),
    "replay": ("replay:Replay", "sampler against trainer with routes replayed and without; planted bugs"),
    "faults": ("faults:Faults", "real runs, hurt at random moments; what is lost"),
    "kills": ("kills:Kills", "one run, killed with -9 and resumed many times, against an undisturbed one"),
    "scaling": ("scaling:Scaling", "forecasts of the end of known runs from their early part"),
    "readme": ("readme:Readme", "write the figures of the README, or check them, from their data"),
}
INSTEAD = {
    ("decode", "--weights"): "weights",
    ("train", "--sft"): "train-sft",
    ("serve", "--catalog"): "serve-catalog",
}
OF_PROCESSES = {
    "side",
    "serve",
    "quickstart",
    "race",
    "faults",
    "kills",
    "scaling",
    "readme",
}  # no threads needed


def run(args: Sequence[str]) -> int:
    """Returns the exit code. Raises ValueError for an unknown bench, or parameters that do not fit."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: ostinato bench NAME [--help]\n")
        print("\n".join(f"  {name:13} {what}" for name, (_, what) in BENCHES.items()))
        return 0
    name, *rest = args
    if name not in BENCHES:
        raise ValueError(f"there is no bench {name!r}; use one of {', '.join(BENCHES)}")
    for (of, flag), other in INSTEAD.items():
        if name == of and flag in rest:
            name, rest = other, [word for word in rest if word != flag or flag == "--weights"]
    if name not in OF_PROCESSES:
        logging.basicConfig(format="%(message)s")
        logging.getLogger(threads.__name__).setLevel(logging.INFO)
        threads.configure(work=threads.Products(model=_model(rest)))  # before torch is imported
    return main(f"ostinato bench {name}", load(name), rest)


def _model(args: Sequence[str]) -> str:
    """What follows --model; else what most benches measure."""
    flat = [word for arg in args for word in arg.split("=", 1)]
    return dict(pairwise(flat)).get("--model", "smollm2-135m")


def load(name: str) -> type[Bench]:
    module, _, cls = BENCHES[name][0].partition(":")
    return getattr(import_module(f"lab.{module}"), cls)
