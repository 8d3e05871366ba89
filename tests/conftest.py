"""What every test shares: one thread (tensors are small), no network, markers, a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ostinato import isa

isa.apply()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, later than this file
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile(
    "ostinato", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("ostinato")

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _skip_without_hardware(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cluster"):
        pytest.skip("needs more than one machine")
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty user cache for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
