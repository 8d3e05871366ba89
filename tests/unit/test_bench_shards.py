"""The table of ``ostinato bench shards``, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ostinato.bench.shards import BEGIN, END, table, write

ROW: dict[str, Any] = {
    "model": "tiny",
    "batch": 8,
    "weight_mb": 12.34,
    "pass_ms": 1.5,
    "collectives_ms": 0.75,
    "collectives": 9.0,
    "sent_mb": 0.125,
    "publish_ms": 3.0,
    "published_mb": 0.5,
}
RESULT = {
    "rows": [{**ROW, "fused": True}, {**ROW, "layout": "t2"}],
    "dtype": "float32",
    "context": 96,
    "machine": {"processor": "one", "cores": 2},
}


def test_one_rank_says_nothing_to_others() -> None:
    one, ranks = table(RESULT).splitlines()[2:4]
    assert one == "| tiny | 1, fused | 12.3 | 8 | 1.50 | - | - | - | 3 |"
    assert ranks == "| tiny | t2 | 12.3 | 8 | 1.50 | 0.75 | 9 | 0.12 | 3 (0.5) |"
    assert "float32, 96 positions seen; processor one, cores 2." in table(RESULT)


def test_the_page_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(RESULT, page)
    write(RESULT, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| tiny | t2 |") == 1
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        write(RESULT, page)
