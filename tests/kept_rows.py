"""Kept lines of runs whose law is known, as ``ostinato ablate --collect`` writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ostinato.scaling.ablation import REFERENCE
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.series import simulated

LAWS = {
    REFERENCE: Sigmoid(R0=0.3, A=0.6, B=1.9, C_mid=1e12),
    "CISPO -> DAPO clip": Sigmoid(R0=0.3, A=0.5, B=1.9, C_mid=1e12),
    "a | pipe": Sigmoid(R0=0.3, A=0.6, B=1.9, C_mid=1e12),
}


def kept_row(arm: str, seed: int, law: Sigmoid, n: int = 24) -> dict[str, Any]:
    compute = np.linspace(2.5e11, 6e12, n)
    one = simulated(law, compute, sd=0.003, rho=0.3, seed=sum(map(ord, arm)) + seed)
    return {
        "arm": arm,
        "seed": seed,
        "overrides": [],
        "held_out": "0123456789ab",
        "prompts": "ba9876543210",
        "judged": '{"functions": ["exact"]}',
        "split": "eval",
        "metric": "pass@1",
        "low": 0.0,
        "high": 1.0,
        "R0": 0.3,
        "R0_stderr": 0.002,
        "score": one.score.tolist(),
        "stderr": [0.004] * n,
        "unmeasured": 0,
        "compute": {"flops": compute.tolist(), "steps": list(range(8, 8 * n + 1, 8))},
        "ended": True,
        "acted": {"cispo_clip_ratio": 0.0, "interrupt/rate": 0.02, "staleness/mean": 8.0},
    }
