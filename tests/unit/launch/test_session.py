"""A run that is interrupted says where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ostinato.config import Recipe, dump_toml
from ostinato.launch import session
from ostinato.run import RunFolder


def test_ctrl_c_while_a_session_begins_says_where_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.load("quickstart")
    RunFolder.create(tmp_path / "run", dump_toml(recipe))

    def ends(said: KeyboardInterrupt) -> None:
        def fake(*given: Any, **more: Any) -> None:
            raise said

        monkeypatch.setattr(session, "_session", fake)
        session._train(recipe, tmp_path / "run", Console(quiet=True), again=False, workers="")

    with pytest.raises(KeyboardInterrupt, match="ostinato resume"):
        ends(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="as it said"):
        ends(KeyboardInterrupt("as it said"))
