"""``ostinato train quickstart`` on the device: killed on the way, resumed, to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from lab.gpu.world import Line, Lines, World
from ostinato.run import MAIN_SET, RunFolder

POLL_S = 0.2


def quickstart(world: World) -> Lines:
    """Half of it, kill -9, ``resume`` to the end."""
    logs, steps = world.folder / "runs", world.sizes.steps
    recipe = [
        "quickstart",
        *(f"trainer.steps={steps}", f"log.dir={logs}", f"model.device={world.device.type}"),
        *("trainer.checkpoint_every=1", f"eval.every={steps}", "engine.threads=1"),
        *(("eval.n=16", "rollout.prompts_per_step=2", "rollout.group_size=4") if world.dry else ()),
        *(("model.dtype=float32",) if world.dry else ()),
    ]
    start = time.perf_counter()
    child = _started(["train", *recipe], world.folder / "train.log")
    try:
        while child.poll() is None and _steps_done(logs) < max(1, steps // 2):
            time.sleep(POLL_S)
    finally:
        child.kill()
        child.wait()
    done = _steps_done(logs)
    yield Line(name="steps before kill -9", value=float(done), bar=max(1, steps // 2))
    folder = next(path for path in logs.iterdir() if path.is_dir())
    again = _started(["resume", str(folder)], world.folder / "resume.log")
    try:
        code = again.wait()
    finally:
        again.kill()
    last = (world.folder / "resume.log").read_text(errors="replace").strip().splitlines()[-1:]
    yield Line(
        name="exit code of resume", value=float(code), bar=0, most=True, note="" if not code else last[0]
    )
    run = RunFolder.open(folder)
    rows = list(run.metrics.rows())
    yield Line(name="steps in the end", value=float(len(rows)), bar=steps, unit=f"of {steps}")
    yield Line(name="seconds of the run", value=time.perf_counter() - start, unit="s")
    k3 = max((row.get("sampling/kl_k3", 0.0) for row in rows), default=0.0)
    yield Line(name="k3 of trainer and sampler, worst step", value=k3, unit="nats", bar=1e-3, most=True)
    scores = [row["pass@1"] for row in run.eval.rows() if row.get("set", MAIN_SET) == MAIN_SET]
    ends = f"{scores[0]:.3f} before" if scores else ""
    yield Line(name="pass@1 after", value=scores[-1] if scores else None, bar=0.8, speed=True, note=ends)


def _started(args: list[str], log: Path) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", "ostinato", *args]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT)


def _steps_done(logs: Path) -> int:
    found = list(logs.glob("*/metrics.jsonl"))
    return len(found[0].read_bytes().splitlines()) if found else 0
