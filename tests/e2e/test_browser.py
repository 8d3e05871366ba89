"""The page in a real browser: every figure is there, no text becomes markup, and it grows with the run."""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from browsers import a_browser, dump_dom
from golden_run import PROBE, SIBLINGS, STEPS, TITLES, add_step, byte_renderer, golden

from ostinato.apps.product.loop import Decision, Finding, Position, Stage, Verdict, advance
from ostinato.config import Recipe, dump_toml
from ostinato.observe.figures import figures
from ostinato.observe.page import digest, write_report
from ostinato.observe.page import html as page_of
from ostinato.observe.page.serve import JOURNAL, LiveJournal, LivePage, Server, open_server
from ostinato.observe.rows import RunRows
from ostinato.run import Jsonl, RunFolder

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    a_browser()
    folder = tmp_path_factory.mktemp("report")
    return write_report([golden(folder / "run")], renderer=byte_renderer(folder / "tokenizer"))


def opening(dom: str) -> str:
    return dom[dom.index("<html") : dom.index(">", dom.index("<html"))]


def assert_inert(dom: str) -> None:
    """No script error, and what others wrote is text: prompts, answers, names, faults, causes, settings."""
    assert "data-error" not in opening(dom) and "data-pwned" not in dom
    assert not re.search(r"<img(?! src=\"data:image/png|[^>]* src=\"data:image/png)", dom)
    assert "&lt;/script&gt;&lt;img src=x onerror=" in dom


def test_every_figure_is_on_the_page_and_no_text_becomes_markup(page: Path) -> None:
    dom = dump_dom(f"{page.as_uri()}#all", page.parent / "profile")
    assert_inert(dom)
    titles = {html.unescape(title) for title in re.findall(r"<h3>(.*?)</h3>", dom)}
    assert titles - {"What every worker did"} == TITLES
    assert dom.count('<div class="uplot') == len(TITLES) and f'data-charts="{len(TITLES)}"' in opening(dom)
    assert 'data-lanes="5"' in opening(dom) and f'data-samples="{SIBLINGS}"' in opening(dom)
    seen = html.unescape(dom)
    for one in figures(RunRows(RunFolder(page.parent)).read()):
        assert f"<span>{one.name}</span>" in seen and one.note in seen, one.name
    assert "It is 5, says step 1." in seen and f"It is 7, says step {STEPS}." in seen  # before and after
    for words in (
        "The run collapsed",
        "ostinato serve",
        "Planned for",
        "text.png (no PNG)",
        "graded gave no",
    ):
        assert words in seen
    assert 'class="fold wrong"' in dom and seen.count("reward 1</b>") >= 1


# A reader who hovers over a word and works the controls, in a narrow window inside a wide one.
READER = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms)), at = (id) => document.getElementById(id);
const until = async (what) => { for (let i = 0; i < 100 && !what(); i++) await wait(50); return what(); };
(async () => {
  const root = document.documentElement, form = document.querySelector("form.samples");
  const cards = () => document.querySelectorAll(".answer").length;
  const seen = { open: [...document.querySelectorAll(".fold[open]")].map((fold) => fold.id) };
  for (const fold of document.querySelectorAll(".fold:not([hidden])")) fold.open = true;
  await until(() => root.dataset.samples);
  Object.assign(seen, { wide: root.scrollWidth - innerWidth, all: cards() });
  const word = document.querySelectorAll(".t")[1];
  word.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  seen.token = at("token").textContent;
  const plot = document.querySelector('[data-chart="Entropy"]');
  plot.focus();
  plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home", bubbles: true }));
  seen.step = plot.parentElement.querySelector(".at").textContent;
  document.querySelector('[data-do="in"]').click();
  seen.zoomed = document.querySelector("figure.gantt").dataset.window;
  form.filter.value = "solved";
  form.filter.dispatchEvent(new Event("change"));
  seen.solved = cards();
  form.filter.value = "all";
  form.find.value = "onerror";
  form.find.dispatchEvent(new Event("input"));
  seen.found = cards();
  const pick = document.querySelector(".pick [name=metric]"), before = Number(root.dataset.charts);
  pick.value = "groups/outstanding";
  pick.dispatchEvent(new Event("change"));
  seen.chosen = Number(root.dataset.charts) - before;
  seen.pwned = root.dataset.pwned ?? null;
  seen.error = root.dataset.error ?? null;
  parent.postMessage(JSON.stringify(seen), "*");
})();
"""
FRAME = """<iframe src="read.html" width="WIDTH" height="800"></iframe><script>
const seen = document.createElement("output");
addEventListener("message", (event) => { seen.textContent = event.data; document.body.append(seen); });
</script>"""


def with_reader(text: str, reader: str) -> str:
    """The page with a reader's script, which its policy then admits too."""
    text = text.replace("script-src ", f"script-src '{digest(reader)}' ", 1)
    return text.replace("</body>", f"<script>{reader}</script></body>")


def reported(dom: str) -> dict[str, Any]:
    (found,) = re.findall(r"<output>(.*?)</output>", dom)
    return json.loads(html.unescape(found))


@pytest.mark.parametrize("width", [390, 1280])
def test_a_reader_opens_folds_hovers_and_searches(page: Path, tmp_path: Path, width: int) -> None:
    (tmp_path / "read.html").write_text(
        with_reader(page.read_text(encoding="utf-8"), READER), encoding="utf-8"
    )
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    seen = reported(dump_dom((tmp_path / "frame.html").as_uri(), tmp_path / "profile"))
    assert seen["error"] is None and seen["pwned"] is None
    assert {"policy", "faults"} <= set(seen["open"]) and "recipe" not in seen[
        "open"
    ]  # where something is wrong
    assert seen["wide"] <= 0  # nothing to scroll sideways
    assert "log p" in seen["token"] and "token id" in seen["token"] and seen["step"] == "step 1"
    assert (seen["all"], seen["solved"], seen["found"], seen["chosen"]) == (SIBLINGS, 1, 1, 1)
    start, stop = map(int, seen["zoomed"].split("-"))
    assert 30_000 < stop - start < 45_000  # half of the run


def test_an_empty_run_and_two_runs_side_by_side(page: Path, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "empty", dump_toml(Recipe()))
    dom = dump_dom(f"{write_report([run]).as_uri()}#all", tmp_path / "profile")
    assert 'data-samples="none"' in opening(dom) and "data-error" not in opening(dom)
    assert "has not begun yet" in dom and 'data-charts="0"' in opening(dom)
    both = write_report([run, RunFolder(page.parent)], tmp_path / "both.html")
    dom = dump_dom(f"{both.as_uri()}#all", tmp_path / "profile")
    assert "data-error" not in opening(dom) and '<h1 id="name">2 runs</h1>' in dom
    assert "Held-out pass@1" in dom and dom.count('<div class="uplot') > 20
    chart = {
        "title": "Score",
        "steps": [1, 2],
        "series": [{"label": PROBE, "color": "--blue", "values": [1, 2]}],
    }
    table = {"title": "Arm", "head": ["after"], "rows": [[PROBE, "1"]], "note": ""}
    other = tmp_path / "compare.html"
    other.write_text(page_of({"title": "arms", "lead": [PROBE], "tables": [table], "charts": [chart]}))
    dom = dump_dom(other.as_uri(), tmp_path / "profile")
    assert_inert(dom)
    assert 'data-charts="1"' in opening(dom) and "<td" in dom


def test_the_page_of_a_product_s_loop(tmp_path: Path) -> None:
    """A round with its decisions, reasons and prices, from its journal alone."""
    steps = [Finding(figures={"pairs": 212.0, "seconds": 3.0}), Finding(frozen=5.0)]
    steps += [Finding(revision="0123456789abcdef", figures={"seconds": 41.0}), Finding()]
    steps += [Finding(verdict=Verdict.ALARM, reasons=(f"gold fell {PROBE}",), figures={"kl": 0.25})]
    at = Position()
    for number, one in enumerate(steps):
        after, what = advance(at, one)
        row = Decision(ts=1.7e9 + number, before=at, finding=one, after=after, what=what).row()
        Jsonl(tmp_path / JOURNAL).append(row)
        at = after
    with served(LiveJournal(tmp_path), "") as server:
        dom = dump_dom(server.address, tmp_path / "profile", budget_ms=4000)
    assert_inert(dom)
    assert 'data-decisions="5"' in opening(dom) and 'class="now" aria-current="step">Collect' in dom
    seen = re.sub(r"<[^>]*>", "", dom)
    for words in ("0123456789abcdef judge in use since", "the model itself policy in use", "kl 0.25"):
        assert words in seen
    assert "policy training stopped by an alarm" in seen and "41 s judge" in seen
    assert [f'{stage.value}: "' in dom for stage in Stage] == [True] * len(Stage)  # its names in page.js


# ---- the live page: it grows as rows are appended


@contextmanager
def served(live: LivePage | LiveJournal, reader: str) -> Iterator[Server]:
    live.__dict__["page"] = with_reader(live.page.decode(), reader).encode()
    server = open_server(live, "127.0.0.1")
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.05))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


FOLLOWER = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms)), root = document.documentElement;
const until = async (what) => { for (let i = 0; i < 200 && !what(); i++) await wait(100); return what(); };
(async () => {
  const seen = {}, reward = () => document.querySelector('[data-chart="Reward"]');
  const last = () => reward()?.getAttribute("aria-label") ?? "";
  await until(() => root.dataset.step === "8");
  for (const fold of document.querySelectorAll(".fold:not([hidden])")) fold.open = true;
  await until(() => root.dataset.samples && root.dataset.lanes && last());
  seen.before = last();
  seen.steps = document.getElementById("steps").textContent;
  seen.charts = root.dataset.charts;
  await fetch("/rows?ready=1");
  await until(() => root.dataset.step === "9" && last().includes("step 9"));
  seen.after = last();
  const form = document.querySelector("form.samples");
  form.step.value = "3";
  form.step.dispatchEvent(new Event("change"));
  await until(() => (document.querySelector(".answer")?.textContent ?? "").includes("says step 3"));
  seen.wide = root.scrollWidth - innerWidth;
  seen.pwned = root.dataset.pwned ?? null;
  seen.error = root.dataset.error ?? null;
  const output = document.createElement("output");
  output.textContent = JSON.stringify(seen);
  document.body.append(output);
})();
"""


@pytest.mark.parametrize("width", [500, 1280])
def test_the_live_page_grows_as_rows_are_appended(tmp_path: Path, width: int) -> None:
    run, ready = golden(tmp_path / "run", 8, ended=False), threading.Event()
    live = LivePage(run)
    rows = live.routes["/rows"]

    def when_asked(params: Mapping[str, list[str]]) -> dict[str, Any]:
        if "ready" in params:
            ready.set()
        return rows(params)

    def grow() -> None:
        if ready.wait(60):
            add_step(run, 9)

    live.routes["/rows"] = when_asked
    growing = threading.Thread(target=grow)
    with served(live, FOLLOWER) as server:
        growing.start()
        dom = dump_dom(server.address, tmp_path / "profile", budget_ms=20_000, width=width)
        ready.set()
        growing.join()
    seen = reported(dom)
    assert seen["error"] is None and seen["pwned"] is None and seen["wide"] <= 0
    assert "step 1 to step 8" in seen["before"] and "step 1 to step 9" in seen["after"]
    assert seen["steps"].startswith("step 8 of 12, about ") and int(seen["charts"]) > 25
    assert 'class="state live"' in dom
    assert_inert(dom)
