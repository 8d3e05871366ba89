"""Without a card the kernels run in Triton's interpreter, chosen before Triton is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a kernel masks, numpy computes in the interpreter, and warns of it."""
    for item in items:
        if item.path.parent.name == "cuda":
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"))
