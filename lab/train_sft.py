"""``ostinato bench train --sft``: tokens per second of supervised training, ours and TRL's ``SFTTrainer``, on
the same model, adapter and rows, which are tokens already."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.contender import ContenderFailed
from lab.harness import ModelBench, Result, Say, option
from lab.settings import our_threads, torch_threads
from lab.train import PEERS, run
from ostinato.model.config import read_config

PACK = 1024  # tokens of a row of TRL's, packed
PACKINGS = {"packed, 1 x 1024": (True, 1), "packed, 2 x 1024": (True, 2), "padded, 4 alike": (False, 4)}
Setting = tuple[str, str, str]  # dtype, packing, threads


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSft(ModelBench):
    """One epoch of ``rows`` with prompts of 16 to 64 tokens and answers of 64 to 384, 8 rows a step (TRL,
    packed: 2 x 1024 tokens), LoRA r = 16 on all linear layers, AdamW; the first step warms up."""

    peer_dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16", "autocast"), "TRL takes the one in which it is faster."
    )
    rows: int = option(40, "Of an epoch.")
    rounds: int = option(3, "Runs of each, alternating.")
    tokens_per_microbatch: int = option(2048, "Of ours.")
    trl_python: str | None = option(None, "The python of an environment with trl.")

    def quick(self) -> TrainSft:
        return replace(self, rounds=1, rows=16)

    def measure(self, say: Say) -> dict[str, Any]:
        runs: dict[str, list[dict[str, Any]]] = {"ostinato": []}
        peer = None
        if self.trl_python:
            peer, runs["trl"] = _best(self, say), []
        for number in range(self.rounds):
            for name, of in runs.items():
                of.append(_ours(self) if peer is None or name == "ostinato" else _trl(self, peer))
                say(f"round {number + 1}: {name} {_speed(of[-1]):.0f} tokens/s")
        return _summary(self, runs, peer)

    @staticmethod
    def table(result: Result) -> str:
        lines = [f"{result['work']}, {result['model']} {result['dtype']}"]
        for name in ("ostinato", "trl"):
            if (one := result.get(name)) is not None:
                setting = f" ({one['setting']})" if "setting" in one else ""
                lines.append(
                    f"{name:8} {one['tokens_per_s']:5.0f} tokens/s, peak {one['peak_mb']} MB{setting}"
                )
        if "ratio" in result:
            low, high = result["ratio_range"]
            lines.append(f"ostinato is {result['ratio']:.2f}x as fast ({low:.2f} to {high:.2f} by round)")
        return "\n".join(lines)


def _summary(
    bench: TrainSft, runs: Mapping[str, Sequence[Mapping[str, Any]]], peer: Setting | None
) -> dict[str, Any]:
    """Speeds are medians of the runs, the ratio that of the rounds' ratios."""
    speeds = {name: [_speed(run) for run in of] for name, of in runs.items()}
    result: dict[str, Any] = {
        "model": bench.model,
        "dtype": bench.dtype,
        "work": f"{bench.rows} rows of {runs['ostinato'][0]['tokens']} tokens together, 8 a step, "
        "LoRA r=16 on all linear layers",
    }
    for name, of in runs.items():
        result[name] = {
            "tokens_per_s": round(statistics.median(speeds[name]), 1),
            "peak_mb": round(max(run["peak_mb"] for run in of)),
            "tokens": of[0]["tokens"],
            "loss": round(of[0]["loss"], 4),  # the mean over the epoch: it is the same training
            "label": of[0]["ready"],
            "rounds": [round(speed, 1) for speed in speeds[name]],
        }
    if peer is not None:
        ratios = [ours / theirs for ours, theirs in zip(speeds["ostinato"], speeds["trl"], strict=True)]
        result["trl"]["setting"] = ", ".join(peer)
        result["ratio"] = round(statistics.median(ratios), 3)
        result["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return result


def _speed(run: Mapping[str, Any]) -> float:
    """Tokens of all rows, prompts too, per second, from the second step on."""
    return sum(run["step_tokens"][1:]) / sum(run["step_s"][1:])


def _best(bench: TrainSft, say: Say) -> Setting:
    """TRL's fastest dtype, in it its fastest packing, in both its fastest threads, from an epoch of two steps
    each. A setting that fails is named and left out. Raises ContenderFailed where all do."""
    threads = list(torch_threads())
    packing, small = next(iter(PACKINGS)), replace(bench, rows=16)
    found: dict[Setting, float] = {}

    def probe(settings: Sequence[Setting]) -> Setting:
        for setting in settings:
            if setting in found:
                continue
            try:
                found[setting] = _speed(_trl(small, setting))
            except ContenderFailed as error:
                say(f"trl, {', '.join(setting)}: {error}")
            else:
                say(f"trl, {', '.join(setting)}: {found[setting]:.0f} tokens/s")
        if not found:
            raise ContenderFailed("trl failed in every setting, see above")
        return max(found, key=found.__getitem__)

    dtype, _, _ = probe([(dtype, packing, threads[0]) for dtype in bench.peer_dtypes])
    _, packing, _ = probe([(dtype, packing, threads[0]) for packing in PACKINGS])
    return probe([(dtype, packing, label) for label in threads])


def planted(vocab_size: int, count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of tokens drawn at random: what is learned does not matter, but how long they are."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt, answer = int(draw.integers(16, 65)), int(draw.integers(64, 385))
        tokens = draw.integers(0, vocab_size, prompt + answer)
        rows.append({"input_ids": tokens.tolist(), "completion_mask": [0] * prompt + [1] * answer})
    return rows


def _ours(bench: TrainSft) -> dict[str, Any]:
    task = {"tokens_per_microbatch": bench.tokens_per_microbatch, "threads": our_threads()}
    return _run(bench, "ostinato", [sys.executable, "-m", "lab.train_worker"], task, {})


def _trl(bench: TrainSft, setting: Setting) -> dict[str, Any]:
    assert bench.trl_python is not None
    dtype, packing, threads = setting
    packed, batch = PACKINGS[packing]
    task = {"dtype": dtype, "packing": packed, "batch": batch, "pack": PACK}
    command = [bench.trl_python, str(PEERS / "trl_train.py")]
    return _run(bench, "trl", command, task, torch_threads()[threads])


def _run(
    bench: TrainSft, name: str, command: Sequence[str], task: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"  # too long for an argument
        rows.write_text(json.dumps(planted(read_config(bench.folder).vocab_size, bench.rows)))
        common = {"folder": str(bench.folder), "dtype": bench.dtype, "rows": str(rows), "output": folder}
        return run(name, [*command, json.dumps({**common, **task})], environ)
