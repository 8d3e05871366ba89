"""``ostinato bench train``: seconds per GRPO step, ours and TRL's, on the same model, prompts and lengths."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from lab.contender import ContenderFailed
from lab.harness import ModelBench, Result, Say, option
from lab.settings import our_threads, torch_threads
from lab.whole_runs import output

PEERS = Path(__file__).parent / "peers"
RUN_LIMIT_S = 1200.0
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "List five things to consider before adopting a dog from a shelter.",
    "What are the main differences between a hurricane and a tornado?",
)


class Backend(StrEnum):
    """Of our step."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(ModelBench):
    """4 prompts x 8 completions x exactly ``new_tokens`` tokens, LoRA r = 16 on all linear layers."""

    peer_dtypes: tuple[str, ...] = ("float32", "bfloat16")  # TRL takes the one in which it is faster
    group: int = 8
    new_tokens: int = 64
    rounds: int = option(3, "Runs of each, alternating.")
    steps: int = 4  # of a run; the first warms up
    backend: Backend = option(Backend.NATIVE, "As model.backend.")
    tokens_per_microbatch: int = 576  # a group: prompt 30, 8 x 63 rows
    trl_python: str | None = option(None, "The python of an environment with trl.")
    probe: bool = True  # whether TRL's fastest setting is looked for; else its first dtype, batches of 8

    def quick(self) -> Train:
        return replace(self, rounds=1, steps=2, new_tokens=16, probe=False)

    def measure(self, say: Say) -> dict[str, Any]:
        peer = _best_trl(self, say) if self.trl_python else None
        ours: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        for round_ in range(self.rounds):
            ours.append(_ours(self))
            say(f"round {round_ + 1}: ostinato {_median_step(ours[-1]):.2f} s per step")
            if peer is not None:
                theirs.append(_trl(self, **peer))
                say(f"round {round_ + 1}: trl {_median_step(theirs[-1]):.2f} s per step")
        return _summary(self, ours, theirs, peer)

    @staticmethod
    def table(result: Result) -> str:
        split = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result["split"].items())
        lines = [
            result["work"] + f", {result['model']} {result['dtype']}",
            f"ostinato  {result['seconds_per_step']:7.2f} s per step ({split}), peak {result['peak_mb']} MB",
        ]
        if "trl" in result:
            trl = result["trl"]
            lines.append(
                f"trl       {trl['seconds_per_step']:7.2f} s per step, "
                f"peak {trl['peak_mb']} MB ({trl['setting']})"
            )
            lines.append(
                f"ostinato is {result['ratio_vs_trl']:.2f}x as fast as trl "
                f"with {result['peak_memory_vs_trl']:.2f} of its peak memory"
            )
        return "\n".join(lines)


def _summary(
    bench: Train,
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    peer: Mapping[str, Any] | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": bench.model,
        "dtype": bench.dtype,
        "work": f"{len(PROMPTS)} prompts x {bench.group} completions x {bench.new_tokens} tokens, "
        "LoRA r=16 on all linear layers",
        "seconds_per_step": _overall(ours),
        "split": {
            name: round(statistics.median(run["split"][name] for run in ours), 3) for name in ours[0]["split"]
        },
        "peak_mb": round(max(run["peak_mb"] for run in ours)),
        "label": ours[0]["ready"],
        "rounds": [[round(s, 3) for s in run["step_s"][1:]] for run in ours],
    }
    if theirs and peer is not None:
        result["trl"] = {
            "seconds_per_step": _overall(theirs),
            "peak_mb": round(max(run["peak_mb"] for run in theirs)),
            "label": theirs[0]["ready"],
            "setting": peer["label"],
            "rounds": [[round(s, 3) for s in run["step_s"][1:]] for run in theirs],
        }
        result["ratio_vs_trl"] = round(result["trl"]["seconds_per_step"] / result["seconds_per_step"], 3)
        # the setting of TRL's that needs least memory would not be its fastest: this compares the runs timed
        # here
        result["peak_memory_vs_trl"] = round(result["peak_mb"] / result["trl"]["peak_mb"], 3)
    return result


def _overall(runs: Sequence[Mapping[str, Any]]) -> float:
    return round(statistics.median(_median_step(run) for run in runs), 3)


def _median_step(run: Mapping[str, Any]) -> float:
    return statistics.median(run["step_s"][1:])


def _best_trl(bench: Train, say: Callable[[str], None]) -> dict[str, Any]:
    """TRL's fastest dtype, then in it its fastest batch and threads, from two steps each with fewer tokens; a
    setting that fails is named and left out."""
    threads = torch_threads()
    if not bench.probe:
        return _setting(bench.peer_dtypes[0], 8, next(iter(threads)))
    small = replace(bench, new_tokens=max(1, bench.new_tokens // 4))
    found = _probed(small, [(dtype, 8, next(iter(threads))) for dtype in bench.peer_dtypes], say, prompts=1)
    if found:
        dtype = min(found, key=found.__getitem__)[0]
        found = _probed(small, [(dtype, batch, label) for label in threads for batch in (8, 32)], say)
    if not found:
        raise ContenderFailed("trl failed in every setting, see above")
    return _setting(*min(found, key=found.__getitem__))


def _probed(
    bench: Train,
    settings: Sequence[tuple[str, int, str]],
    say: Callable[[str], None],
    prompts: int = len(PROMPTS),
) -> dict[tuple[str, int, str], float]:
    """Seconds per step by (dtype, batch, threads)."""
    found = {}
    for place in settings:
        setting = _setting(*place)
        try:
            found[place] = _median_step(_trl(bench, **setting, steps=2, prompts=prompts))
        except ContenderFailed as error:
            say(f"trl, {setting['label']}: {error}")
            continue
        say(f"trl, {setting['label']}: {found[place]:.2f} s for {prompts} prompts, {bench.new_tokens} tokens")
    return found


def _setting(dtype: str, batch: int, threads: str) -> dict[str, Any]:
    label = f"{dtype}, batch {batch}, {threads}"
    return {"dtype": dtype, "batch": batch, "environ": torch_threads()[threads], "label": label}


def _ours(bench: Train) -> dict[str, Any]:
    task = _task(bench) | {"tokens_per_microbatch": bench.tokens_per_microbatch, "threads": our_threads()}
    task["backend"] = bench.backend
    return run("ostinato", [sys.executable, "-m", "lab.train_worker", json.dumps(task)], {})


def _trl(
    bench: Train,
    *,
    dtype: str,
    batch: int,
    environ: Mapping[str, str],
    label: str,
    steps: int | None = None,
    prompts: int = len(PROMPTS),
) -> dict[str, Any]:
    assert bench.trl_python is not None
    with tempfile.TemporaryDirectory() as output:
        task = _task(bench) | {"batch": batch, "output": output, "gradient_checkpointing": False}
        task |= {"steps": steps or bench.steps, "dtype": dtype, "prompts": PROMPTS[:prompts]}
        return run("trl", [bench.trl_python, str(PEERS / "trl_train.py"), json.dumps(task)], environ)


def _task(bench: Train) -> dict[str, Any]:
    return {
        "folder": str(bench.folder),
        "dtype": bench.dtype,
        "prompts": PROMPTS,
        "group": bench.group,
        "new_tokens": bench.new_tokens,
        "steps": bench.steps,
    }


def run(name: str, command: Sequence[str], environ: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Run one contender to its end; its only line of output is its answer. ``more``: as of ``output``."""
    printed = output(name, command, environ=environ, **{"limit_s": RUN_LIMIT_S, **more})
    if not printed.strip():
        raise ContenderFailed(f"{name} failed: it printed nothing")
    return json.loads(printed.strip().splitlines()[-1])
