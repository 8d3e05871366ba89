"""``ostinato scale ledger``: what runs have cost, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_ledger import a_step, killed_and_resumed, start

from ostinato.cli.app import main
from ostinato.run import RunFolder


def run_of(path: Path, *rows: dict[str, Any]) -> RunFolder:
    run = RunFolder.create(path, "[trainer]\nsteps = 3\n")
    run.ledger.append(*rows)
    return run


def scale(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["scale", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_one_run_in_words_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", *killed_and_resumed())
    assert scale("ledger", run.path) == 0
    text = capsys.readouterr().out
    for words in ("run: 3 steps, started twice", "wasted: repeated", "6.0 s", "27.5%", "16.5 k", "restarts"):
        assert words in text
    assert scale("ledger", run.path, "--json", "-") == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["useful"] + sum(found["wasted"].values()) == sum(found["flops"].values()) == 16_500
    assert found["compute"]["flops"] == 16_500
    assert found["pools"]["local"]["lost"] == 6.0 and found["evaluation"]["flops"] == 400


def test_several_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        run_of(tmp_path / "one" / "run", *killed_and_resumed()),
        run_of(tmp_path / "other" / "run", start(1, 0.0, price=0.0), a_step(1, 1, 15.0)),
    ]
    with runs[1].ledger.path.open("ab") as file:
        file.write(b'{"event":"step","session":1,"ste')
    assert scale("ledger", *(run.path for run in runs)) == 0
    text = capsys.readouterr().out
    assert (
        "run (1): 3 steps" in text and "run (2): 1 steps, started once" in text and "torn by a kill" in text
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "run run has no row in ledger.jsonl; it has finished no step yet"),
        ([{"step": 1, "wall_s": 2.0}], "line 1 of "),
    ],
)
def test_what_cannot_be_added_up_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], said: str
) -> None:
    assert scale("ledger", run_of(tmp_path / "run", *rows).path) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.out == ""
