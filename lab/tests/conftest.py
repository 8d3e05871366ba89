"""Every test of the lab is marked so: `make test-lab` runs them. Scripts of studies are imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(folder) for folder in (HERE.parent / "studies").iterdir()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)
