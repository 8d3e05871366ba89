"""What every test shares: one thread (tensors are small), no network, markers, caches, a budget."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from ostinato import isa

if TYPE_CHECKING:
    from ostinato.model.native import Kernels

isa.apply()
if not Path("/dev/nvidiactl").exists():  # decides what Triton's functions are when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, later than this file
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
logging.getLogger("ostinato").setLevel(logging.INFO)  # for caplog

settings.register_profile(
    "ostinato", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("ostinato")

# Under nohup, or in the background of a shell, signals are ignored, by the processes of tests too, and a test
# that raised one waited for ever.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

REPOSITORY = Path(__file__).parent
BUDGET_S = 1.0  # of the processor, for a unit test that is not marked slow
DEAREST = 20  # files, and tests, that are listed at the end


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Compile the kernels before the workers start: they all need them while they collect."""
    from ostinato.model.native import BuildError, load_kernels

    with contextlib.suppress(BuildError):  # without a compiler the tests of native kernels are skipped
        load_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that the workers end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    return (yield from _timed(item, "fixtures_cpu_s"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    return (yield from _timed(item, "cpu_s"))


def _timed(item: pytest.Item, name: str) -> Generator[None, None, None]:
    start = _cpu_s()
    try:
        return (yield)
    finally:
        item.user_properties.append((name, _cpu_s() - start))


def _cpu_s() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    spent = sorted(((dict(r.user_properties).get("cpu_s", 0.0), r) for r in reports), key=lambda x: -x[0])
    if not spent:
        return
    files, fixtures_s = Counter[str](), 0.0
    for cpu_s, report in spent:
        of_fixtures = dict(report.user_properties).get("fixtures_cpu_s", 0.0)
        files[report.nodeid.partition("::")[0]] += cpu_s + of_fixtures  # pyright: ignore[reportArgumentType]
        fixtures_s += of_fixtures  # pyright: ignore[reportOperatorIssue]
    tests_s = sum(cpu_s for cpu_s, _ in spent)
    terminalreporter.section(f"{tests_s:.0f} CPU seconds in tests, {fixtures_s:.0f} in their fixtures")
    for name, cpu_s in files.most_common(DEAREST):
        terminalreporter.write_line(f"{cpu_s:8.2f} s  {name}")
    for idx, (cpu_s, report) in enumerate(spent):
        over = cpu_s > BUDGET_S and report.nodeid.startswith("tests/unit/") and not _is_slow(report)
        if idx < DEAREST or over:
            mend = f"  over {BUDGET_S:g} s: make it cheaper or mark it slow" if over else ""
            terminalreporter.write_line(f"{cpu_s:8.2f} s  {report.nodeid}{mend}")


def _is_slow(report: pytest.TestReport) -> bool:
    return not {"slow", "lab"}.isdisjoint(report.keywords)


@pytest.fixture(autouse=True)
def _skip_without_hardware(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cluster"):
        pytest.skip("needs more than one machine")
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The native kernels; a test of them is skipped where there is no compiler."""
    from ostinato.model.native import BuildError, load_kernels

    try:
        return load_kernels()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty user cache for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
