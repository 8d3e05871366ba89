"""A run as sessions: one after the other where a better layout was found, and back where it cannot begin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato.cli import session
from ostinato.cli.replanning import Switch
from ostinato.cli.session import Outcome
from ostinato.config import Recipe, dump_toml
from ostinato.pipeline.state import Finish
from ostinato.run import RunFolder

Session = Callable[..., tuple[Outcome, Switch | None]]
SWITCH = Switch(step=4, overrides=("parallel.layout=d2",), reason="shorter answers")


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *ends: Any) -> list[tuple[str, Switch | None]]:
    """Layouts and switches of the sessions, which end with ``ends``: a switch, None, or an error, raised
    before the loop or, as ("begun", error), behind its beginning."""
    recipe, seen, left = Recipe.load("quickstart"), list[tuple[str, Switch | None]](), list(ends)
    RunFolder.create(path, dump_toml(recipe))

    def fake(
        recipe: Recipe, *, switched: Switch | None = None, begun: threading.Event | None = None, **more: Any
    ) -> tuple[Outcome, Switch | None]:
        seen.append((recipe.parallel.layout, switched))
        end = left.pop(0)
        if isinstance(end, tuple):
            assert begun is not None
            begun.set()
            raise end[1]
        if isinstance(end, BaseException):
            raise end
        return Outcome(folder=path, step=9, why=Finish.DONE, before=None, after=None), end

    monkeypatch.setattr(session, "_session", fake)
    session._train(recipe, path, Console(quiet=True), again=False, workers="")
    assert not left
    return seen


def test_a_session_follows_where_another_layout_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path / "run", monkeypatch, SWITCH, None) == [("", None), ("d2", SWITCH)]


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("out of memory"), OSError("no port")])
def test_a_layout_that_cannot_begin_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Any error but a ValueError had ended a run that was well."""
    seen = run(tmp_path / "run", monkeypatch, SWITCH, error, None)
    assert [layout for layout, _ in seen] == ["", "d2", ""]
    back = seen[-1][1]
    assert back is not None and back.rests and str(error) in back.told
    (row,) = RunFolder.open(tmp_path / "run").replan.rows()
    assert row["step"] == 4 and str(error) in row["reason"]


def test_what_fails_later_is_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="the trainer broke"):
        run(tmp_path / "run", monkeypatch, SWITCH, ("begun", RuntimeError("the trainer broke")))


def test_ctrl_c_between_sessions_says_where_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt, match="ostinato resume"):
        run(tmp_path / "run", monkeypatch, SWITCH, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="as it said"):
        run(tmp_path / "other", monkeypatch, SWITCH, KeyboardInterrupt("as it said"))
