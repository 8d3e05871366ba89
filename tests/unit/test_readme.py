"""The figures of the README are those of the files that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import readme
from lab.settings import machine

PAGES = ["README.md", "docs/measured.md"]


def page(name: str, file: str = "data.json") -> str:
    return f"before\n<!-- figures: {name} {file} -->\nold\n<!-- /figures -->\nbehind\n"


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs data\.json"):
        readme.written(page("rollouts"), tmp_path)
    with pytest.raises(ValueError, match="luck is not known"):
        readme.written(page("luck"), tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_agrees_with_its_data(repository: Path, page: str) -> None:
    """The README's tables were typed in by hand: they gave 1398 tokens/s where the lab notes gave 1183."""
    file = repository / page
    text = file.read_text(encoding="utf-8")
    assert readme.written(text, file.parent) == text, f"run: ostinato bench readme --page {page}"


def test_every_figure_says_what_it_is_of() -> None:
    found = machine()
    assert {"processor", "flags", "instruction_set", "threads", "torch", "commit", "date"} <= found.keys()
