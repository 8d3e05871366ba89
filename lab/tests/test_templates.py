"""What is said of a template is so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.templates import cells, main
from ostinato.model.named import ASSETS

pytestmark = pytest.mark.lab


def test_the_packaged_template_is_equal_and_one_that_takes_tools_is_compared_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((ASSETS / "seed-moe" / "tokenizer_config.json").read_text())
    (tmp_path / "ours.jinja").write_text(config["chat_template"])
    (tmp_path / "tools.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] -%}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    )
    found = cells(tmp_path / "tools.jinja", tmp_path / "folder")
    assert (found["tools"], found["calls"]) == ("equal", "equal")
    assert main(str(tmp_path)) == 0
    assert "calls          ours 1, equal 1" in capsys.readouterr().out
