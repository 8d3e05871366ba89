"""Without a card kernels run in Triton's interpreter: the conftest.py of the repository sees to it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a kernel masks, numpy computes in the interpreter, and warns of it."""
    for item in items:
        if item.path.parent.name == "cuda":
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"))
