"""``ostinato catalog``: from an adapter's folder to versions that are promoted, rolled back and deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import adapters_of, tiny_decoder

from ostinato.apps.serve.catalog_command import app
from ostinato.model.peft_io import LOGICAL, save_peft


def test_a_policy_from_its_first_version_to_its_end(tmp_path: Path, capsys: Any) -> None:
    decoder = tiny_decoder()
    save_peft(adapters_of(decoder), decoder, tmp_path / "adapter")
    folder, adapter = str(tmp_path / "catalog"), str(tmp_path / "adapter")

    def run(*words: str) -> list[str]:
        app([words[0], folder, *words[1:]], standalone_mode=False)
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert run("add", "maths", adapter) == ["maths@1"]
    assert run("add", "maths", adapter) == ["maths@2"]
    assert run("add", "tone", adapter, "--parent", "maths@1") == ["tone@1"]
    assert run("list") == ["maths@2", "tone@1"] and run("list", "tone") == ["tone@1", "maths@1"]
    assert run("promote", "maths", "1") == ["maths@1"] and run("roll-back", "maths") == ["maths@2"]
    (key,) = run("key", "ann")
    assert key.startswith("ost-") and run("add", "maths", adapter, "--owner", "ann") == ["maths@1"]
    assert run("delete", "maths") == ["2"] and run("list") == ["tone@1"]
    (tmp_path / "adapter" / LOGICAL).write_bytes(b"half")
    with pytest.raises(ValueError, match="truncated or not an adapter"):
        run("add", "tone", adapter)
    (tmp_path / "adapter" / LOGICAL).unlink()
    with pytest.raises(ValueError, match="--base MODEL"):
        run("add", "tone", adapter)
    assert run("list") == ["tone@1"]
