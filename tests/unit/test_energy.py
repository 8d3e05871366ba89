"""Joules from counters of the hardware, on a made-up powercap tree: summed once, unwrapped, or not told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.energy import Meter, Rapl, nvml, rapl

RANGE = 262_143_328_850  # microjoules, as on many processors


def domain(root: Path, folder: str, name: str, microjoules: int | str, most: int = RANGE) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    return path


def test_packages_and_their_memory_once_each(tmp_path: Path) -> None:
    """The cores are in their package, "psys" is the whole board, and mmio is the first package once more.
    What is counted has a name: the sum of a process without the rights to some of it is another sum."""
    paths = [
        domain(tmp_path, "intel-rapl:0", "package-0", 1_000_000),
        domain(tmp_path, "intel-rapl:0:0", "core", 500_000),
        domain(tmp_path, "intel-rapl:0:1", "dram", 2_000_000),
        domain(tmp_path, "intel-rapl:1", "package-1", 0),
        domain(tmp_path, "intel-rapl:2", "psys", 9_000_000),
        domain(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000),
    ]
    counters = rapl(tmp_path)
    meter = Meter(counters)
    assert {kind: len(some) for kind, some in counters.items()} == {"processor": 2, "memory": 1}
    assert meter.kinds == ("memory", "processor") and meter() == 0
    for path in paths:
        (path / "energy_uj").write_text("3000000")
    assert meter() == pytest.approx(2 + 1 + 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20_000_000), min_size=1, max_size=20), st.integers(0, 10**7))
def test_a_counter_that_wraps_goes_on(
    tmp_path_factory: pytest.TempPathFactory, used: list[int], first: int
) -> None:
    root, most = tmp_path_factory.mktemp("powercap"), 20_000_001
    path = domain(root, "intel-rapl:0", "package-0", first % most, most)
    counter, raw = Rapl(path, clock=lambda: 0.0), first % most
    for joules in used:
        raw = (raw + joules) % most
        (path / "energy_uj").write_text(str(raw))
        assert counter() is not None
    assert counter() == pytest.approx(sum(used) / 1e6)


def test_a_counter_that_may_have_wrapped_twice_is_not_told_any_more(tmp_path: Path) -> None:
    """Left alone for longer than a package that draws 1 kW takes to fill it: 262 s."""
    now = [0.0]
    counter = Rapl(domain(tmp_path, "intel-rapl:0", "package-0", 5), clock=lambda: now[0])
    now[0] = 262.0
    assert counter() == 0
    now[0] += 263.0
    assert counter() is None
    assert counter() is None


def test_where_nothing_tells_there_is_no_figure(tmp_path: Path) -> None:
    nothing = {"processor": [], "memory": []}
    assert rapl(tmp_path) == rapl(tmp_path / "nothing") == nothing
    domain(tmp_path, "intel-rapl:0", "package-0", "garbage")
    assert rapl(tmp_path) == nothing and Meter(nothing)() is None and Meter(nothing).kinds == ()
    assert nvml(["GPU-0"], library="libthere-is-none.so.1") == []


def test_one_counter_that_fails_takes_the_sum_with_it(tmp_path: Path) -> None:
    """A sum without one of the packages would look like all of it."""
    first = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    domain(tmp_path, "intel-rapl:1", "package-1", 0)
    meter = Meter(rapl(tmp_path))
    assert meter() == 0
    (first / "energy_uj").unlink()
    assert meter() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_counter_for_root_alone_is_absent(tmp_path: Path) -> None:
    (domain(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj").chmod(0)
    assert rapl(tmp_path)["processor"] == []


def test_the_meter_looks_by_itself() -> None:
    looks: list[int] = []

    def counter() -> float:
        looks.append(1)
        return float(len(looks))

    meter = Meter({"GPU": [counter]}, every_s=0.002)
    while len(looks) < 3:
        pass
    assert meter() is not None


FAKE_NVML = """
#include <string.h>
static int device = 7;
static unsigned long long millijoules = 1500;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  *handle = &device;
  return strncmp(uuid, "GPU-", 4) != 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *energy) {
  if (*(int *)handle != 7) return 2;
  *energy = millijoules += 500;
  return 0;
}
"""


def test_nvml_as_its_manual_has_it(tmp_path: Path) -> None:
    """The three calls, by their signatures in NVML's reference; millijoules since the driver was loaded."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(FAKE_NVML)
    library = str(tmp_path / "libnvml.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    (counter,) = nvml(["GPU-1f"], library)
    before, after = counter(), counter()
    assert before is not None and after is not None and after - before == 0.5
    assert nvml(["MIG-1f"], library) == nvml([], library) == []


@pytest.mark.gpu
def test_a_gpu_tells_its_joules() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    (counter,) = nvml([f"GPU-{torch.cuda.get_device_properties(0).uuid}"])
    before = counter()
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(400):
        x = x @ x / 64
    torch.cuda.synchronize()
    after = counter()
    assert before is not None and after is not None and 0 < after - before < 10_000
