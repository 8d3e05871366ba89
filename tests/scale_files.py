"""What tests of ``ostinato scale`` read: simulated runs as CSV files and as run folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from small_ledger import a_step, start

from ostinato.cli.app import main
from ostinato.run import RunFolder
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.series import Series, simulated

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)


def scale(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["scale", *map(str, arguments)])
    return int(caught.value.code or 0)


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON object), which is all that is printed, by a parser that takes no NaN."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    code = scale(*arguments, "--json", "-")
    return code, json.loads(capsys.readouterr().out, parse_constant=refuse)


def evaluations(last: float, n: int = 20, curve: Sigmoid = SCALERL, seed: int = 0) -> Series:
    return simulated(curve, np.linspace(last / n, last, n), seed=seed)


def write_csv(path: Path, compute: Sequence[float], score: Sequence[float], R0: float = 0.4) -> Path:
    rows = "".join(f"{C},{R}\n" for C, R in zip(compute, score, strict=True))
    path.write_text(f"compute,score\n0,{R0}\n{rows}")
    return path


WORK = {
    "tokens": {"prefilled": 10, "sampled": 100, "trained": 50, "dropped": {"truncated": 50}},
    "flops": {"sample": 4 * 10**11, "train": 6 * 10**11, "measure": 0},
    **{"useful": 5 * 10**11, "wasted": {"truncated": 5 * 10**11}},
}


def new_run(path: Path, last: float = 20.0, truncated: float = 0.0, task: str = "") -> RunFolder:
    """20 steps of 1e12 FLOPs each, evaluated before and after every one; half of the compute is wasted."""
    run = RunFolder.create(path, f"[trainer]\nsteps = 20\n{task}")
    truth = Sigmoid(R0=0.4, A=0.61, B=1.9, C_mid=4.0)
    row = {"split": "eval", "n": 1000, "samples": 16}
    run.eval.append({**row, "step": 0, "pass@1": 0.4, "seconds": 2.0})
    run.ledger.append(start(1, 1000.0, price=0.0, loading=0.0))
    for step in range(1, int(last) + 1):
        run.write(step, {"completions/clipped_ratio": truncated})
        run.ledger.append(a_step(1, step, 1000.0 + 10.0 * step, **WORK))
        run.eval.append({**row, "step": step, "pass@1": float(truth.score(step)), "seconds": 1.0})
    return run
