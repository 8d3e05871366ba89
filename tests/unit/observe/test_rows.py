"""Rows of a run folder: each once however a log grows, and what is torn, broken or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from golden_run import golden, rows_of, score
from hypothesis import given
from hypothesis import strategies as st
from pipeline_rows import step_row, step_spans
from small_ledger import start

from ostinato.config import Recipe, dump_toml
from ostinato.observe.concerns import count_faults
from ostinato.observe.figures import describe, figures
from ostinato.observe.rows import RunRows, Tail, main_scores, thin_rows
from ostinato.observe.stats import number
from ostinato.run import Jsonl, RunFolder


def values(rows: list[dict[str, Any]]) -> list[int]:
    return [row["n"] for row in rows]


@given(st.lists(st.one_of(st.integers(1, 40), st.just(0)), max_size=20))
def test_however_a_log_grows_its_rows_come_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int]
) -> None:
    """Written in pieces of any size, so that most ends are torn; a 0 reads twice in between."""
    path = tmp_path_factory.mktemp("tail") / "log.jsonl"
    content = b"".join(b'{"n": %d}\n' % n for n in range(25))
    tail, written, found = Tail(path), 0, list[int]()
    for piece in [*pieces, len(content)]:
        with path.open("ab") as file:
            file.write(content[written : written + piece])
        written += piece
        for _ in range(2 if not piece else 1):
            found += values(tail.read()[1])
    assert found == list(range(25)) and not tail.damage


def test_a_replaced_log_is_read_anew(tmp_path: Path) -> None:
    """A resumed run drops the rows of later steps: another file takes the place of the log, or it is cut in
    place and grows again."""
    log = Jsonl(tmp_path / "log.jsonl")
    log.append(*({"n": n} for n in range(5)))
    tail = Tail(log.path)
    tail.read()
    log.keep(lambda row: row["n"] < 3)
    log.append({"n": 30})
    replaced, rows = tail.read()
    assert replaced and values(rows) == [0, 1, 2, 30]
    with log.path.open("rb+") as file:
        file.truncate(8)
        file.seek(8)
        file.write(b'{"n":7}\n{"n":8}\n{"n":9}\n{"n":10}\n')
    replaced, rows = tail.read()
    assert replaced and values(rows) == [0, 7, 8, 9, 10]
    log.path.unlink()
    assert tail.read() == (True, [])


def test_a_damaged_line_ends_the_reading_in_words_until_it_is_whole(tmp_path: Path) -> None:
    """A network disk may show the length of a file before its bytes: zeros, which then become the row."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n' + b"\0" * 8 + b'\n{"n": 3}\n')
    tail = Tail(path)
    assert values(tail.read()[1]) == [1] and "log.jsonl has a line at byte 9" in tail.damage
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert values(tail.read()[1]) == [2, 3] and not tail.damage


def test_a_killed_run_with_torn_and_broken_logs_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse({"trainer": {"steps": 3}})))
    run.write(1, {"reward": float("nan")})
    run.write(2, {"reward": 0.5})
    run.write(2, {"reward": 0.6})  # done again: the last one counts
    with run.metrics.path.open("ab") as file:
        file.write(b'{"step": 3, "rew')
    run.eval.path.write_text('{"step": 0, "split": "eval", "pass@1": null}\nnot json\n{"step": 2}\n')
    run.ledger.append(start(1, 1.7e9), {"event": "step", "step": 1})
    run.timeline.append(step_spans(1)[0].to_json(), {"worker": "a", "kind": "sleeps", "from": 1, "to": 2})
    (run.path / "plan.json").write_text("{")
    data = RunRows(run).read()
    assert [row["reward"] for row in data.metrics] == [None, 0.6]
    assert len(data.evals) == 1 and len(data.spans) == 1 and len(data.logs["ledger"]) == 1
    damage = " ".join(data.damage)
    for words in ("eval.jsonl has a line", "ledger.jsonl has a row that has no", "plan.json cannot be read"):
        assert words in damage
    assert len(figures(data)) == 10 and len(describe(data)) == 8


def test_what_is_followed_is_what_is_read_at_once(tmp_path: Path) -> None:
    """And a run that went back to a checkpoint begins another epoch, without the rows that it lost."""
    run = golden(tmp_path / "run", 6)
    data = RunRows(run, follow=True).read()
    assert data.logs["metrics"] == RunRows(run).read().logs["metrics"]
    assert [row["step"] for log, row in data.arrived if log == "metrics"] == [1, 2, 3, 4, 5, 6]
    epoch = data.epoch
    run.truncate_after(3)
    data.look()
    assert data.epoch > epoch
    assert [row["step"] for log, row in data.arrived if log == "metrics"] == [1, 2, 3]
    assert any(log == "timeline" for log, _ in data.arrived)


def test_only_the_last_minutes_of_a_timeline_are_followed(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe()))
    for step in (1, 400):
        run.ledger.append(start(1, 1.76e9) if step == 1 else step_row(step))
        run.timeline.append(*(span.to_json() for span in step_spans(step)))
    assert min(span.start for span in RunRows(run, follow=True).read().spans) > 1.76e9 + 390 * 6
    assert min(span.start for span in RunRows(run).read().spans) < 1.76e9


@given(st.integers(0, 400), st.sampled_from([4, 8, 32]))
def test_thinned_rows_are_the_means_of_neighbours(count: int, most: int) -> None:
    column = [None if n % 7 == 3 else float(n * n % 101) for n in range(count)]
    rows = [{"step": n + 1, "x": value} for n, value in enumerate(column)]
    found = thin_rows(rows, most)
    assert len(found) < 2 * most + 2
    if count < 2 * most:
        assert found == rows
        return
    each = count // most
    assert [row["step"] for row in found] == [min(n + each, count) for n in range(0, count, each)]
    for row, n in zip(found, range(0, count, each), strict=True):
        known = [value for value in column[n : n + each] if value is not None]
        assert row.get("x") == (pytest.approx(sum(known) / len(known)) if known else None)


def test_scores_of_the_sampler_are_apart_from_that_of_what_is_exported() -> None:
    """With an int8 sampler the last held-out score was the sampler's, unlabelled."""
    rows = [score(0, 0.3, weights="int8"), score(9, 0.8, weights="int8"), score(9, 0.9, weights="model")]
    rows += [score(9, 0.7, set="greedy"), score(9, 0.1, set="hard")]
    found = main_scores(rows, {"engine": {"weights": "int8"}})
    assert [row["pass@1"] for row in found["evals"]] == [0.3, 0.8]
    assert found["exported"]["pass@1"] == 0.9 and [row["pass@1"] for row in found["greedy"]] == [0.7]


def test_what_is_no_number_is_a_gap() -> None:
    row = {"a": None, "b": "nan", "c": float("inf"), "d": True, "e": 3}
    assert [number(row, name) for name in "abcdef"] == [None, None, None, None, 3.0, None]
    assert count_faults(rows_of()).rows == []
