"""``ostinato bench repeat``: whether short runs from one state repeat to the bit, beside other load.

Every run samples, trains and publishes ``steps`` times from one seed. Two digests are kept of it: of what
was sampled, and of the trainer's parameters and optimizer moments at its end. Runs are spread over several
processes, since addresses of tensors differ more between processes than within one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.contender import Contender
from lab.harness import Bench, Result, Say, option
from lab.settings import folder_of, machine

KERNELS = ("native", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat(Bench):
    """``runs`` of each dtype with each set of kernels, ``load`` busy processes beside them."""

    model: str = option("asset:seed-moe", "A Hugging Face folder or a model name.")
    runs: int = option(50, "Of each dtype with each set of kernels.")
    steps: int = option(3, "Of a run.")
    threads: int = option(2, "Of a run.")
    load: int = option(1, "Busy processes beside the runs.")
    processes: int = 5
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kernels: tuple[str, ...] = KERNELS
    prompts: int = 2
    group: int = 8
    new_tokens: int = 16

    def quick(self) -> Repeat:
        return replace(self, runs=min(self.runs, 5))

    def measure(self, say: Say) -> dict[str, Any]:
        rows = []
        with tempfile.TemporaryDirectory() as logs, _busy(self.load):
            for kernels, dtype in itertools.product(self.kernels, self.dtypes):
                rows.append(_setting(self, kernels, dtype, Path(logs) / "worker.log"))
                say(_line(rows[-1]))
        return {
            "repeats": all(len(row["sampled"]) == len(row["trained"]) == 1 for row in rows),
            "rows": rows,
            "machine": machine() | {"threads": self.threads},
        }

    @property
    def folder(self) -> Path:
        return folder_of(self.model)

    @staticmethod
    def passed(result: Result) -> bool:
        return result["repeats"]

    @staticmethod
    def table(result: Result) -> str:
        settings = result["settings"]
        verdict = "every run repeats to the bit" if result["repeats"] else "runs do NOT repeat"
        head = (
            f"{settings['runs']} runs of {settings['steps']} steps, {settings['model']}, "
            f"{settings['threads']} threads, beside {settings['load']} busy processes: {verdict}"
        )
        return "\n".join([head, *(_line(row) for row in result["rows"])])


def _setting(bench: Repeat, kernels: str, dtype: str, log: Path) -> dict[str, Any]:
    """Digests of all runs of a dtype with a set of kernels, and how many runs had each."""
    task = {
        "folder": str(bench.folder),
        "dtype": dtype,
        "native": kernels == "native",
        "threads": bench.threads,
        "prompts": bench.prompts,
        "group": bench.group,
        "new_tokens": bench.new_tokens,
        "steps": bench.steps,
    }
    command = [sys.executable, "-m", "lab.repeat_worker", json.dumps(task)]
    sampled, trained = Counter[str](), Counter[str]()
    for runs in _shares(bench.runs, bench.processes):
        environ = {"OMP_NUM_THREADS": str(bench.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        with Contender(f"{kernels} {dtype}", command, log, environ=environ) as worker:
            for _ in range(runs):
                found = worker.ask()
                sampled[found["sampled"]] += 1
                trained[found["trained"]] += 1
    return {"kernels": kernels, "dtype": dtype, "sampled": dict(sampled), "trained": dict(trained)}


def _line(row: Mapping[str, Any]) -> str:
    def counted(digests: Mapping[str, int]) -> str:
        return ", ".join(f"{digest} x {count}" for digest, count in digests.items())

    name = f"{row['kernels']:6} {row['dtype']:8}"
    return f"{name}  sampled {counted(row['sampled'])}; trained {counted(row['trained'])}"


def _shares(runs: int, processes: int) -> list[int]:
    """``runs`` over at most so many processes, as evenly as can be."""
    processes = min(runs, processes)
    return [runs * (i + 1) // processes - runs * i // processes for i in range(processes)]


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """``count`` processes that each keep a core busy meanwhile."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
