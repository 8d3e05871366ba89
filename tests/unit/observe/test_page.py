"""The page as a file and over HTTP: what it admits, what it holds, and which rows come behind an offset."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from golden_run import BEGAN, PROBE, STEPS, add_step, golden, rows_of
from pipeline_rows import step_row, step_spans

from ostinato.cli.report import local_renderer
from ostinato.config import Recipe, dump_toml
from ostinato.observe import page
from ostinato.observe.figures import compare_plan, count_work, steps_of
from ostinato.observe.page import read_pictures, read_workers, use, write_report
from ostinato.observe.page.serve import AGAIN_S, JOURNAL, LiveJournal, LivePage, open_page, open_server
from ostinato.run import RunFolder


class Tags(HTMLParser):
    """The tags of a page, and the texts of its script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data


def test_what_others_wrote_is_data_and_only_its_own_scripts_are_admitted(tmp_path: Path) -> None:
    text = write_report([golden(tmp_path / "run")]).read_text(encoding="utf-8")
    found = Tags(text)
    assert "img" not in {tag for tag, _ in found.tags} and PROBE not in text
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert not [a for _, a in found.tags if "src" in a or "href" in a] and not re.findall(
        r"url\(|@import", text
    )
    data, *scripts = found.scripts
    run = json.loads(data)["runs"][0]
    assert run["state"]["pairs"][0]["before"]["prompt"].endswith(PROBE) and len(scripts) == 5
    policy = next(a["content"] or "" for _, a in found.tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy and policy.count("'sha256-") == 5 and "unsafe-eval" not in policy
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy


def test_python_draws_nothing() -> None:
    """Rows are the interface: no markup in any string of the package that reads runs."""
    folder = Path(page.__file__).parents[1]
    for file in folder.rglob("*.py"):
        assert not re.search(r"<(svg|div|table|p|h\d|span)\b|</", file.read_text(encoding="utf-8")), file.name


def test_a_report_is_written_whatever_there_is(tmp_path: Path) -> None:
    """An empty run, half of a surrogate pair in a text, a model that is not on this machine, two runs."""
    empty = RunFolder.create(tmp_path / "empty", dump_toml(Recipe.parse({"model": {"path": "some/where"}})))
    assert local_renderer(empty) is None
    assert "</html>" in write_report([empty]).read_text(encoding="utf-8")
    empty.watch.append({"step": 1, "rule": "\ud83d", "sentence": "\ud83d"})
    run = golden(tmp_path / "run", 2)
    own = write_report([run]).read_text(encoding="utf-8")
    both = write_report([empty, run])  # several runs once overwrote the page of the first
    assert both == tmp_path / "report-2-runs.html" and run.report.read_text(encoding="utf-8") == own
    data = json.loads(Tags(both.read_text(encoding="utf-8")).scripts[0])
    assert "not scored on the same held-out prompts" in data["between"][0]
    assert [run["name"] for run in data["runs"]] == ["empty", "run"] and "samples" not in data
    assert [len(run["state"]["figures"]) for run in data["runs"]] == [10, 10]


def test_pictures_and_workers_are_read_or_named(tmp_path: Path) -> None:
    run = golden(tmp_path / "run", 1)
    found = read_pictures(run.path / "pictures")
    assert [name for name, _ in found["shown"]] == ["a <b>"] and found["left_out"] == ["text.png (no PNG)"]
    path = run.path / "workers.json"
    assert [one["state"] for one in read_workers(path)] == ["alive", "starting", "alive"]
    assert read_workers(path, live=False)[0]["state"] == "was alive" and read_workers(path)[0]["since"] > 299
    for broken in ("[", "{}", '[1, {"state": 3}]'):
        path.write_text(broken)
        assert read_workers(path) == []


def test_idle_time_is_by_pool_of_the_steps_that_the_timeline_has() -> None:
    """A long run leaves steps out of its timeline: they are not idle, nothing is known of them."""
    data = rows_of(ledger=[step_row(n) for n in (1, 2, 3)])
    data.spans = [span for n in (1, 3) for span in step_spans(n)]
    rows, whole = use(data)
    assert [row["step"] for row in rows] == [1, 3] and set(rows[0]) == {
        "step",
        "samplers",
        "trainer",
        "graders",
    }
    assert whole is not None and whole.stop == 12.0 and 0.2 < rows[0]["trainer"] < 0.45
    table = count_work(whole)
    assert [row[0] for row in table.rows][-2:] == ["trainer", "grader-0"] and table.head[0] == "worked"
    again = {**step_row(2), "session": 2, "ended_at": BEGAN + 100}
    found = steps_of(
        [{"event": "start"}, step_row(1), step_row(2), again, step_row(3) | {"ended_at": BEGAN + 101}]
    )
    assert [step for step, _, _ in found] == [1, 2, 2, 3] and found[-1][1] == BEGAN + 100


def test_a_plan_stands_beside_the_run() -> None:
    rows = [{"step": n, "time/train_s": 4.0 * (1 + 9 * (n == 1)), "step_time": 6.0} for n in (1, 2, 3)]
    data = rows_of(metrics=rows)
    assert compare_plan(data) is None
    data.plan = {
        "seconds": {"train": {"compute": 2.0, "x": "odd"}, "rollout": 3},
        "total": 3.0,
        "traffic": {"a/b": None},
    }
    table = compare_plan(data)
    assert table is not None
    lines = {name.partition("\n")[0]: cells for name, *cells in table.rows}
    assert lines["train"] == ["2", "4", "2.00"] and lines["step"] == ["3", "6", "2.00"]


# ---- over HTTP


@contextmanager
def served(run: RunFolder) -> Iterator[tuple[str, int]]:
    with open_server(LivePage(run), "127.0.0.1") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield "127.0.0.1", server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(where: tuple[str, int], path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*where, timeout=10)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    answered = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return answered


def ask(live: LivePage, **parameters: int) -> dict[str, Any]:
    live._looked = live._due = float("-inf")
    return live.routes["/rows"]({name: [str(value)] for name, value in parameters.items()})


def steps(reply: dict[str, Any]) -> list[int]:
    return [row["step"] for row in reply["rows"]["metrics"]]


def test_rows_come_behind_the_offset_and_anew_where_a_log_was_replaced(tmp_path: Path) -> None:
    run = golden(tmp_path / "run", 5, ended=False)
    live = LivePage(run)
    first = ask(live)
    assert steps(first) == [1, 2, 3, 4, 5] and first["state"]["figures"] and first["status"]["tone"] == "live"
    seen = {"epoch": first["epoch"], "from": first["next"], "state": first["revision"]}
    again = ask(live, **seen)
    assert steps(again) == [] and "state" not in again and again["next"] == first["next"]
    add_step(run, 6)
    later = ask(live, **seen)
    assert steps(later) == [6] and later["progress"]["step"] == 6 and "state" in later
    run.truncate_after(3)
    anew = ask(live, **seen | {"from": later["next"]})
    assert steps(anew) == [1, 2, 3] and anew["epoch"] > first["epoch"] and anew["from"] == 0
    add_step(run, 4)  # within half a second nothing is read again
    assert steps(live.routes["/rows"]({})) == [1, 2, 3] and AGAIN_S > 0.1


def test_many_rows_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.observe.page.serve.ROWS", 40)
    live, found, at = LivePage(golden(tmp_path / "run", 6)), list[int](), {"epoch": 0, "from": 0}
    while True:
        reply = ask(live, **at)
        found += steps(reply)
        at["from"] = reply["next"]
        if not reply["more"]:
            break
    assert found == [1, 2, 3, 4, 5, 6]


def test_the_door_and_nothing_outside_the_run(tmp_path: Path) -> None:
    run = golden(tmp_path / "run", 2)
    (tmp_path / "secret").write_text("secret")
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    with served(run) as where:
        status, headers, text = get(where, "/")
        assert status == 200 and headers["X-Frame-Options"] == "DENY" and b"connect-src 'self'" in text
        for path in ("/../secret", "/recipe.toml", "/%2e%2e/secret", "//etc/passwd", "/rows/../../secret"):
            assert get(where, path)[0] == 404
        for path in ("/groups?step=nan", "/groups?step=1e400", "/group?step=9&place=0", "/rows?from=x"):
            assert get(where, path)[0] == 400
        for name, status in (("localhost:1", 200), ("[::1]:7", 200), ("evil.example:7321", 403), ("", 403)):
            assert get(where, "/rows", Host=name)[0] == status
        _, headers, body = get(where, "/groups")
        assert (
            headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
        )
        assert PROBE[:40] in json.loads(body)["groups"][0]["preview"]
        answers = json.loads(get(where, "/group?step=2&place=0")[2])["answers"]
        assert answers[1]["turns"][0]["text"] == PROBE
        with pytest.raises(ValueError, match=rf"port {where[1]} of 127.0.0.1 .*give --port"):
            open_server(LivePage(run), "127.0.0.1", where[1])
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before
    assert os.path.getsize(run.path / "metrics.jsonl") and STEPS > 2


def test_many_ask_at_once(tmp_path: Path) -> None:
    run, found = golden(tmp_path / "run", 1), list[int]()
    live = LivePage(run)
    threads = [
        threading.Thread(target=lambda: found.append(len(live.routes["/rows"]({})))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for step in (2, 3):
        add_step(run, step)
    for thread in threads:
        thread.join()
    assert len(found) == 16


def test_the_journal_of_a_product_s_loop_is_rows_too(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"what":"kept"}\n{"what":"dropped"}\n')
    live = open_page(tmp_path, lambda run: None)
    assert isinstance(live, LiveJournal) and b'"journal"' in live.page
    reply = live.routes["/rows"]({"from": ["1"]})
    assert [row["what"] for row in reply["journal"]] == ["dropped"] and reply["next"] == 2
