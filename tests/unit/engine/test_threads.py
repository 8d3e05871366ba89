"""The choice of threads: who is asked first, what is cached, which candidates there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.engine import threads
from ostinato.engine.threads import Threads, Timing

WORK = threads.Products()
TORCH_LOADED = "ignore:threads.configure was called after torch"


def write_cache(count: int, policy: str) -> None:
    threads.cache_file(WORK).parent.mkdir(parents=True)
    threads.cache_file(WORK).write_text(json.dumps({"best": {"count": count, "policy": policy}}))


def test_the_fastest_that_did_not_fail_wins() -> None:
    slow = Timing(count=1, policy="passive", us_per_token=3.0)
    fast = Timing(count=2, policy="active", us_per_token=2.0)
    failed = Timing(count=4, policy="active", us_per_token=None)
    assert threads.fastest([slow, failed, fast]) is fast
    hardly = Timing(count=2, policy="passive", us_per_token=2.1)
    assert threads.fastest([fast, hardly]) is hardly  # spinning has to be worth it
    assert threads.fastest([failed]) is None


@pytest.mark.filterwarnings(TORCH_LOADED)
def test_given_then_environment_then_cache(own_cache: Path) -> None:
    count = threads.logical_cores()
    write_cache(count, "active")
    empty: dict[str, str] = {}
    assert threads.configure(environ=empty) == Threads(count=count, policy="active", source="cache")
    assert empty == {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "20000"}
    user = {"OMP_NUM_THREADS": "5"}
    assert threads.configure(environ=user) == Threads(count=5, policy="passive", source="environment")
    assert threads.configure(7, "active", environ=user) == Threads(count=7, policy="active", source="given")
    assert user == {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "20000"}
    spins = {"GOMP_SPINCOUNT": "7"}
    assert threads.configure(environ=spins).policy == "active" and spins["GOMP_SPINCOUNT"] == "7"
    waits = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert threads.configure(environ=waits).policy == "passive"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"best": 3}',
        '{"best": {"count": "x", "policy": "active"}}',
        '{"best": {"count": 1, "policy": "eager"}}',
        '{"best": {"count": 1, "policy": null}}',
        '{"best": {"count": 1, "policy": {}}}',
        '{"best": {"count": Infinity, "policy": "active"}}',
        '{"best": {"count": 0, "policy": "active"}}',
        '{"best": {"count": 1000000, "policy": "active"}}',
        "[" * 100_000,
        b"\xff",
    ],
    ids=repr,
)
def test_a_broken_cache_is_as_none(
    own_cache: Path, text: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown policy was a KeyError, one that is null an AttributeError, and an infinity an OverflowError:
    every command ended there until somebody removed the file."""
    threads.cache_file(WORK).parent.mkdir(parents=True)
    threads.cache_file(WORK).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert threads.cached(WORK) is None
    (line,) = caplog.messages
    assert "is damaged or of another version" in line and "\n" not in line


def test_a_probe_times_the_products_of_the_model_that_is_run() -> None:
    """Threads were chosen by products of one small width, whatever was run: one for a server that ran 1.4
    times as fast with two."""
    timed = threads.probe(threads.Products(native=False, dtype="float32"), "passive", [1, 2])
    assert set(timed) == {1, 2} and all(us is not None and us > 0 for us in timed.values())
    assert threads.probe(threads.Products(), "active", [1]) == {}  # one thread never waits


def test_configuring_after_torch_warns(own_cache: Path) -> None:
    import torch  # noqa: F401

    with pytest.warns(UserWarning, match="call it first"):
        threads.configure(1, environ={})
