"""docs/kimi-k2.md is what ``ostinato plan headline`` writes, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.plan.headline import headline

pytestmark = pytest.mark.lab

DOCUMENT = Path(__file__).parents[2] / "docs" / "kimi-k2.md"


def test_the_document_is_what_the_command_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == headline(), (
        "run: ostinato plan headline --out docs/kimi-k2.md"
    )
