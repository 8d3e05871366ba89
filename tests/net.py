"""What a change of the house must not change: adapters of short runs to the byte, forecasts, a plan.

    python tests/net.py     keep the results of this commit for this kind of machine

tests/e2e/test_loop.py compares with them: make test-lab with all, CI with those of ``EVERYDAY``. Adapters
depend on the order of sums, and with it on the processor and on torch: what is kept has their names.
Everything goes through the command line, so that no rename of a module changes what is compared.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ostinato import isa

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "golden" / "net.json"
LIMIT_S = 900
SHORT = ("quickstart", "model.dtype=float32", "engine.threads=1", "eval.n=32", "eval.every=0")
SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=4", "trainer.steps=4")
DIGITS = 6  # of a forecast


RAY = ("cluster.samplers=2", "cluster.remote_trainer=true", "pipeline.staleness=2")
ADAPTERS = {
    **{f"quickstart, seed {seed}": (f"seed={seed}", "trainer.steps=10") for seed in range(3)},
    "d2e2": (*SMALL, "parallel.layout=d2e2"),
    "staleness 2 over Ray": (*SMALL, *RAY),
}
EVERYDAY = ("quickstart, seed 0", "d2e2", "staleness 2 over Ray", "the-recipe-0")


def results(wanted: Collection[str] = (), say: Callable[[str], None] = print) -> dict[str, Any]:
    """Digests of adapters, figures of forecasts, only those ``wanted`` unless empty, and the plan."""
    with tempfile.TemporaryDirectory(prefix="ostinato-net-") as name:
        folder = Path(name)
        adapters = {}
        for n, (run, overrides) in enumerate(ADAPTERS.items()):
            if not wanted or run in wanted:
                adapters[run] = trained(folder / str(n), *overrides)
                say(f"{run}: done")
        curves = {run: path for run, path in kept_runs(folder).items() if not wanted or run in wanted}
        forecasts = {run: forecast(path) for run, path in curves.items()}
        say("forecasts: done")
        plan = json_of(folder / "plan.json", "plan", "kimi-k2", "--gpus", "64xH800-80", "--lora-rank", "32")
    return {"adapters": adapters, "forecasts": forecasts, "plan": plan_table(plan)}


def trained(folder: Path, *overrides: str) -> str:
    """The digest of the adapter of a run of quickstart."""
    folder.mkdir()
    ostinato(folder, "train", *SHORT, *overrides)
    (adapter,) = folder.rglob("adapter/adapter_model.safetensors")
    return hashlib.sha256(adapter.read_bytes()).hexdigest()


def kept_runs(folder: Path) -> dict[str, Path]:
    """The runs of docs/data/own_law.jsonl, or where it has moved to, as CSV files."""
    (source,) = (path for path in ROOT.rglob("own_law.jsonl") if ".venv" not in path.parts)
    found = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        path = folder / f"{row['arm'].replace(' ', '-')}-{row['seed']}.csv"
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("compute", "score"))
            table.writerow((0, row["R0"]))
            table.writerows(zip(row["compute"]["flops"], row["score"], strict=True))
        found[path.stem] = path
    return found


def forecast(path: Path) -> dict[str, Any]:
    """Medians and intervals of the law's parameters."""
    found = json_of(path.with_suffix(".json"), "scale", "fit", str(path), "--axis", "flops")
    return figures({name: found[name] for name in ("A", "B", "C_mid")})


def figures(value: Any) -> Any:
    """Only the numbers of a JSON value, to so many digits, by their places in it."""
    if isinstance(value, dict):
        inside = {name: figures(part) for name, part in value.items()}
        return {name: part for name, part in inside.items() if part not in (None, {}, [])}
    if isinstance(value, list):
        return [part for part in map(figures, value) if part not in (None, {}, [])]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def plan_table(plan: Any) -> Any:
    """The figures of the plans in the table."""
    return figures(plan["plans"])


def json_of(path: Path, *arguments: str) -> Any:
    ostinato(path.parent, *arguments, "--json", str(path))
    return json.loads(path.read_text(encoding="utf-8"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ostinato", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def ostinato(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(
            f"ostinato {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )


def machine() -> str:
    names = [line.partition(":")[2].strip() for line in isa.processor().splitlines() if "model name" in line]
    return f"{names[0] if names else 'unknown'}, {isa.instruction_set()}, torch {version('torch')}"


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted({*before, *after})
        return [
            line for name in names for line in differences(before.get(name), after.get(name), f"{at}/{name}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for n, (a, b) in pairs for line in differences(a, b, f"{at}/{n}")]
    return [] if before == after else [f"{at}: kept {before!r}, now {after!r}"]


def kept() -> dict[str, Any] | None:
    """What was recorded for this kind of machine; the adapters are None where there is nothing of it."""
    if not KEPT.exists():
        return None
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    return {**found, "adapters": found["adapters"].get(machine())}


def record(found: dict[str, Any]) -> None:
    before = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"adapters": {}}
    adapters = {**before["adapters"], machine(): found["adapters"]}
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(
        json.dumps({**found, "adapters": adapters}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    record(results())
