"""The history of a run in its folder: it comes back with the run, and losing it is one note."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ostinato.config import DraftSection
from ostinato.history.store import History
from ostinato.launch.drafts import Memory, load_history, new_memory, save_history
from ostinato.types import HistoryEntry

SECTION = DraftSection(memory_mb=1)


def past(*tokens: int) -> HistoryEntry:
    size = len(tokens)
    return HistoryEntry(
        context=np.array([90, 91], np.int32),
        tokens=np.array(tokens, np.int32),
        probs=np.full(size, 1e-9, np.float32),  # what is nearly impossible was sampled all the same
        edges=np.full(size, 0.5, np.float32),
    )


def memory() -> Memory:
    made = new_memory(SECTION, None)
    if made is None:
        pytest.skip("no compiler: runs do not draft")
    return made


def test_without_a_compiler_drafts_are_off_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert new_memory(SECTION, None) is None
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("nothing is drafted: ")


def test_the_past_of_a_prompt_is_its_newest_answers_without_their_context() -> None:
    mine = memory()
    mine.history.add("a", 1, [past(1, 2)])
    mine.history.add("a", 2, [past(3, 4, 5), past(6)])
    assert [answer.tolist() for answer in mine.past("a")] == [[3, 4, 5], [6]]
    assert list(mine.past("b")) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "foreign"])
def test_a_lost_history_is_one_note_and_the_run_goes_on(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.bin"
    saved = History(memory_mb=1)
    saved.add("a", 1, [past(*range(50))])
    saved.save(path)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        broken = {"cut": whole[:-30], "changed": whole[:-50] + b"?" + whole[-49:], "foreign": b"{}" * 30}
        path.write_bytes(broken[damage])
    assert load_history(SECTION, path) is None
    (note,) = caplog.messages
    assert "history" in note and "\n" not in note


def test_a_full_disk_is_one_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history.bin").mkdir()  # a file cannot take the place of a folder
    save_history(History(memory_mb=1), tmp_path / "history.bin")
    assert len(caplog.messages) == 1 and "not saved" in caplog.text
