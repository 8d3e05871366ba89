"""What Ostinato does on this machine's GPU: kernels against their twins, speeds, memory, a run. One command:

    make gpu-wheels                            # where there is a network: 8 MB into build/gpu-wheels
    python3 -m lab.gpu_check --json gpu.json   # on the card, in the root of the checkout
    python3 -m lab.gpu_check --dry             # the same on a CPU at tiny shapes: make gpu-check ARGS=--dry

The card's Python needs torch (2.10 or newer), numpy, scipy, safetensors, tokenizers, transformers, peft,
typer, rich and jinja2; of WHEELS what it lacks is installed from build/gpu-wheels into a folder of its own.
Under nine minutes on an H100. Each part has a limit and cannot hide the next one: one that fails is a line
FAIL with the end of its error. The JSON is written after each part. Exit 0 without a FAIL (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.gpu.world import Line, Lines, World

ROOT = Path(__file__).parents[1]
WHEELS = {  # import name: wheels that bring it
    "pydantic": ("pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
    "tomli_w": ("tomli_w",),
    "zstandard": ("zstandard",),
}
TOTAL_S = 540.0
SLOWER = 4  # limits of a dry run, on cores that others use too
GRACE_S = 20.0  # of a part that does not end at its limit: then the process ends with what it has
ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # of transformers: cuDNN plans attention anew for every shape
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``run`` yields lines for ``limit_s`` at most."""

    name: str
    limit_s: float
    run: Callable[[World], Lines]


class TooLong(Exception):
    """A part has had its time."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What was measured so far; ``file`` has it as JSON after each part."""

    dry: bool
    machine: dict[str, str]
    file: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, line: Line) -> None:
        row = {"part": part, **asdict(line), "verdict": line.verdict(self.dry)}
        self.rows.append(row)
        print(shown(row), flush=True)

    def fail(self, part: str, name: str, why: str) -> None:
        row = {"part": part, "name": name, "value": None, "verdict": "FAIL", "note": why}
        self.rows.append(row)
        print(shown(row), flush=True)

    def write(self) -> None:
        if self.file is not None:
            tree = {"dry": self.dry, "machine": self.machine, "seconds": self.seconds, "lines": self.rows}
            self.file.write_text(json.dumps(tree, indent=1))

    def count(self, verdict: str) -> int:
        return sum(row["verdict"] == verdict for row in self.rows)


def shown(row: dict[str, Any]) -> str:
    """ "PASS     decode 64 x 512   7,512 tok/s  (at least 4,000)"."""
    value = "" if row["value"] is None else f"{row['value']:,.4g} {row['unit']}".rstrip()
    bar = row.get("bar")
    limit = "" if bar is None else f"(at {'most' if row['most'] else 'least'} {bar:,.4g})"
    return f"{row['verdict']:8s} {row['name'][:62]:62s} {value:>18s} {limit:18s} {row['note']}".rstrip()


def main(args: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a line is FAIL."""
    parser = argparse.ArgumentParser("gpu-check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny shapes: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, part after part")
    parser.add_argument("--only", default="", metavar="A,B", help="parts; all by default")
    given = parser.parse_args(args)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        why = install(Path(scratch) / "site")
        if why:
            print(f"gpu-check: {why}", file=sys.stderr)
            return 2
        return check(given.dry, given.json, {*filter(None, given.only.split(","))}, Path(scratch))


def install(site: Path) -> str:
    """Install missing packages into ``site`` from build/gpu-wheels; why it cannot, or ""."""
    missing = [name for name in WHEELS if importlib.util.find_spec(name) is None]
    if missing:
        folder = ROOT / "build" / "gpu-wheels"
        stems = tuple(stem for name in missing for stem in WHEELS[name])
        files = [file for file in sorted(folder.glob("*.whl")) if file.name.startswith(stems)]
        if len(files) < len(stems):
            return (
                f"{', '.join(missing)} missing, and not in {folder}; run make gpu-wheels and bring the folder"
            )
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        command = [sys.executable, "-m", "pip", "install", *options, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{', '.join(missing)} could not be installed: {done.stderr.strip().splitlines()[-1:]}"
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
    sys.path.insert(0, str(ROOT / "tests"))  # the promises of every engine are there
    sys.path.insert(0, str(ROOT))
    return ""


def parts() -> tuple[Part, ...]:
    from lab.gpu import exact, runs, sampling, training, twins

    return (
        Part(name="ceilings", limit_s=25, run=twins.ceilings),
        *(Part(name=one.__name__, limit_s=40, run=one) for one in twins.PARTS),
        Part(name="proof", limit_s=30, run=sampling.kernels_proven),
        Part(name="contract", limit_s=50, run=sampling.contract),
        Part(name="transformers", limit_s=30, run=sampling.same_logprobs),
        Part(name="agreement", limit_s=40, run=training.agreement),
        Part(name="exact", limit_s=50, run=exact.exact),
        Part(name="sampling", limit_s=150, run=sampling.dense),
        Part(name="training", limit_s=120, run=training.dense),
        Part(name="expert sampling", limit_s=40, run=sampling.experts),
        Part(name="expert training", limit_s=50, run=training.experts),
        Part(name="quickstart", limit_s=110, run=runs.quickstart),
        Part(name="batching", limit_s=45, run=sampling.batching),
    )


def check(dry: bool, file: Path | None, only: set[str], scratch: Path) -> int:
    """Run the parts one after the other, as far as the time goes."""
    import torch

    from lab.gpu.world import Line, World

    if not dry and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device; --dry runs on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if dry else "cuda")
    if dry:
        torch.set_num_threads(1)
    world = World(device=device, dry=dry, folder=scratch)
    report = Report(dry=dry, machine=machine(device), file=file)
    print("   ".join(report.machine.values()), flush=True)
    begun = time.monotonic()
    for part in parts():
        if only and part.name not in only | {"ceilings"}:
            continue
        left, limit_s = begun + TOTAL_S - time.monotonic(), part.limit_s * (SLOWER if dry else 1)
        if left < min(limit_s, 15):
            report.add(part.name, Line(name=part.name, note=f"{left:.0f} s were left of {TOTAL_S:.0f}"))
            continue
        print(f"-- {part.name}", flush=True)
        start = time.monotonic()
        attempt(part, world, report, min(limit_s, left))
        report.seconds[part.name] = round(time.monotonic() - start, 1)
        world.free()
        report.write()
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in ("PASS", "FAIL", "NOT RUN"))
    print(f"{counts}; {time.monotonic() - begun:.0f} s", flush=True)
    return int(report.count("FAIL") > 0)


def attempt(part: Part, world: World, report: Report, limit_s: float) -> None:
    """Run a part; whatever it raises is a line of the report."""
    try:
        with limited(limit_s, lambda: give_up(part, report)):
            for line in part.run(world):
                report.add(part.name, line)
    except TooLong:
        report.fail(part.name, f"{part.name}: the rest", f"it took longer than {limit_s:.0f} s")
    except Exception as error:
        traceback.print_exc()
        last = (str(error).strip().splitlines() or [""])[-1]
        report.fail(part.name, f"{part.name}: the rest", f"{type(error).__name__}: {last}"[:200])


@contextmanager
def limited(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Raises TooLong in the block after ``seconds``; where a call does not return, ``give_up`` is called from
    another thread GRACE_S later."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    watch = threading.Timer(seconds + GRACE_S, give_up)
    watch.daemon = True
    signal.setitimer(signal.ITIMER_REAL, seconds)
    watch.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.cancel()
        signal.signal(signal.SIGALRM, before)


def give_up(part: Part, report: Report) -> None:
    """End the process, with what there is."""
    report.fail(part.name, f"{part.name}: the rest", "it hung, and the check ended here")
    report.write()
    os._exit(1)


def machine(device: Any) -> dict[str, str]:
    """The device and the versions, in words."""
    import torch
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    found = {
        "device": name,
        "python": f"Python {platform.python_version()}",
        "torch": f"torch {torch.__version__}",
    }
    return found | {
        "cuda": f"CUDA {torch.version.cuda}",
        "transformers": f"transformers {transformers.__version__}",
    }


if __name__ == "__main__":
    raise SystemExit(main())
