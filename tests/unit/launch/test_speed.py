"""What doctor says of the machine's speed, on machines that are only figures."""

from __future__ import annotations

from ostinato.engine.threads import Threads
from ostinato.launch.speed import Speed, line, warnings

FAST, SLOW = Speed(sampling=30.0, training=40.0), Speed(sampling=3.0, training=40.0)
MEASURED = Threads(count=2, policy="passive", source="measured")


def said(native: dict[str, Speed] | None, torch: dict[str, Speed], choice: Threads = MEASURED) -> list[str]:
    found = {"torch": torch} if native is None else {"native": native, "torch": torch}
    return list(warnings(found, choice, 4, 4, {}))


def test_a_machine_as_it_should_be_is_not_warned_of() -> None:
    both = {"float32": FAST, "bfloat16": FAST}
    assert said(both, both) == []
    assert line(both).startswith("float32 30.0 GFLOP/s of 16 rows, 40.0 of 256 in training; bfloat16")


def test_what_is_ten_times_slower_is_named_with_its_fix() -> None:
    """ "native kernels ready" was all that doctor said of a machine on which bf16 was seven times slower."""
    fast, mixed = {"float32": FAST, "bfloat16": FAST}, {"float32": FAST, "bfloat16": SLOW}
    (dtype, kernels) = said(mixed, fast)
    assert dtype == 'sampling in bfloat16 is 10x slower than in float32: leave model.dtype at "auto"'
    assert "in bfloat16 is 10x slower than by torch's: set engine.native=false" in kernels
    assert "install a C++ compiler" in said(None, fast)[0]


def test_settings_that_leave_cores_idle_or_make_threads_take_turns_are_named() -> None:
    fast = {"float32": FAST, "bfloat16": FAST}
    one = Threads(count=1, policy="passive", source="environment")
    assert said(fast, fast, one) == ["OMP_NUM_THREADS=1 leaves 3 of 4 cores idle: unset it"]
    assert not said(fast, fast, Threads(count=1, policy="passive", source="cache")), "measured to be faster"
    many = Threads(count=8, policy="passive", source="environment")
    assert "OMP_NUM_THREADS=8 is more than the 4 usable cores" in said(fast, fast, many)[0]
    spinning = {"GOMP_SPINCOUNT": "INFINITE"}
    both = {"native": fast, "torch": fast}
    assert "GOMP_SPINCOUNT" in next(iter(warnings(both, MEASURED, 4, 4, spinning)))
