"""Ledgers made up row by row, for tests of what adds them up."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def start(
    session: int, at: float, step: int = 0, devices: int = 1, price: float = 2.0, loading: float = 5.0
) -> Row:
    return {
        "event": "start",
        "session": session,
        "at": at + loading,
        "process_started": at,
        "step": step,
        "recipe": "0123456789ab",
        "pools": {"local": {"devices": devices, "device": "cpu"}},
        "price_per_device_hour": price,
        "currency": "USD",
    }


def a_step(session: int, step: int, ended_at: float, devices: int = 1, **more: Any) -> Row:
    """Ten seconds, of them 9 busy; 100 tokens sampled, 70 of them trained on."""
    busy = {"sample": 4.0, "grade": 1.0, "train": 3.0, "measure": 1.0}
    return {
        "event": "step",
        "session": session,
        "step": step,
        "seconds": 10.0,
        "ended_at": ended_at,
        "pools": {"local": {"devices": devices, "busy": busy, "idle": 1.0}},
        "tokens": {"prefilled": 20, "sampled": 100, "trained": 70, "dropped": {"zero_variance": 30}},
        "flops": {"sample": 1000, "train": 2000, "measure": 500},
        **more,
    }


def an_eval(session: int, step: int, ended_at: float, devices: int = 1) -> Row:
    return {
        "event": "eval",
        "session": session,
        "step": step,
        "set": "eval",
        "seconds": 4.0,
        "ended_at": ended_at,
        "pools": {"local": {"devices": devices, "busy": {"eval": 4.0}, "idle": 0.0}},
        "tokens": {"sampled": 40},
        "flops": {"eval": 400},
    }


def killed_and_resumed(price: float = 2.0) -> list[Row]:
    """By hand: 3 steps, a checkpoint after the first; killed; on 4 devices from the first on, to step 3.

    Session 1, 1 device at 2 USD (``price``): 5 s of loading, 4 s of evaluation, steps 1 to 3 of 10 s, 2 s
    idle before step 3, 6 s lost. Session 2, 4 devices at 3 USD: 7 s of loading, steps 2 and 3, whose sampling
    the first one has the row of for step 2.
    """
    tokens = {"prefilled": 0, "sampled": 0, "trained": 70, "dropped": {"zero_variance": 30}}
    flops = {"sample": 0, "train": 2000, "measure": 500}
    return [
        start(1, 0.0, price=price),
        an_eval(1, 0, 9.0),
        a_step(1, 1, 19.0),
        a_step(1, 2, 30.0),
        a_step(1, 3, 42.0),
        {"event": "end", "session": 1, "at": 48.0, "step": 3, "why": "failed: X", "seconds": 6.0},
        start(2, 1000.0, step=1, devices=4, price=3.0, loading=7.0),
        a_step(2, 2, 1017.0, devices=4, tokens=tokens, flops=flops),
        a_step(2, 3, 1027.0, devices=4),
        {"event": "end", "session": 2, "at": 1028.0, "step": 3, "why": "done"},
    ]
