"""The board in a real browser: it follows a run that grows, and what a model wrote stays text."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import dump_dom
from pipeline_rows import pipeline_metrics, step_row, step_spans, worker_rows

from ostinato.config import Recipe, dump_toml
from ostinato.observe.board import Server, open_server
from ostinato.observe.report import write_report
from ostinato.observe.report.page.offline import digest
from ostinato.run import RunFolder, group_rows
from ostinato.types import Completion, Group, Prompt, Reward, Stop, Trajectory, Turn

pytestmark = pytest.mark.lab

PROBE = "<script>document.documentElement.dataset.pwned='yes'</script><img src=x onerror=\"alert(1)\">"
BEGAN = 1.76e9


def answer(text: str, reward: float | None) -> Trajectory:
    completion = Completion(
        tokens=np.arange(5, dtype=np.int32),
        logprobs=np.full(5, -0.5, np.float32),
        versions=np.full(5, 2, np.int32),
        stop=Stop.EOS,
        text=text,
    )
    verdict = None if reward is None else Reward(value=reward, parts={"exact": reward})
    turn = Turn(context=np.arange(3, dtype=np.int32), completion=completion)
    return Trajectory(turns=(turn,), stop=Stop.EOS, seed=(0,), reward=verdict)


def a_step(run: RunFolder, step: int) -> None:
    """As the loop leaves it; every answer but one of each group is right."""
    base = {"reward": step / 30, "reward_std": 0.2, "loss": -0.01, "entropy": 1 / step, "tokens_per_s": 900.0}
    run.write(step, {**base, "sampling/kl_k3": 1e-5, f"rewards/{PROBE}/mean": 0.5, **pipeline_metrics(step)})
    run.ledger.append(step_row(step, BEGAN))
    run.timeline.append(*(span.to_json() for span in step_spans(step, BEGAN)))
    prompt = Prompt(uid=f"p{step}{PROBE}", text=f"What is {step} + 1? {PROBE}", columns={"answer": PROBE})
    played = (answer(f"It is {step + 1}.", 1.0), answer(PROBE, 0.0))
    run.trajectories.append(*group_rows(Group(prompt=prompt, trajectories=played, step=step)))


def a_run(path: Path, steps: int) -> RunFolder:
    run = RunFolder.create(path, dump_toml(Recipe.parse({"name": "quickstart", "trainer": {"steps": 30}})))
    start = {"event": "start", "session": 1, "at": time.time(), "process_started": time.time() - 4, "step": 0}
    run.ledger.append({**start, "pools": {}, "price_per_device_hour": 0, "currency": "USD"})
    beat(run)
    for step in range(1, steps + 1):
        a_step(run, step)
    (path / "workers.json").write_text(json.dumps(worker_rows(time.time())))
    run.watch.append({"step": 2, "since": 1, "collapse": True, "sentence": f"k3 {PROBE}"})
    return run


def beat(run: RunFolder) -> None:
    alive = {"session": 1, "at": time.time(), "part": "train"}
    (run.path / "alive.json").write_text(json.dumps(alive))


@contextmanager
def served(run: RunFolder, reader: str = "") -> Iterator[Server]:
    """The board of ``run``, with a reader's script in its page, which the page's policy then admits too."""
    server = open_server(run, "127.0.0.1")
    if reader:
        page = server.board.page.replace(b"script-src ", f"script-src '{digest(reader)}' ".encode(), 1)
        with_reader = page.replace(b"</body>", f"<script>{reader}</script></body>".encode())
        server.board.__dict__["page"] = with_reader
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.05))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def opening(dom: str) -> str:
    return dom[dom.index("<html") : dom.index(">", dom.index("<html"))]


def test_the_board_of_a_run_that_goes(tmp_path: Path) -> None:
    """Everything is drawn, the page has no error, and nothing that others wrote has become markup."""
    with served(a_run(tmp_path / "run", 12)) as server:
        dom = dump_dom(server.address, tmp_path / "profile", budget_ms=4000)
    assert "data-error" not in opening(dom) and "data-pwned" not in opening(dom)
    assert 'data-lanes="5"' in opening(dom) and 'data-workers="3"' in opening(dom)
    assert 'data-answers="24"' in opening(dom)
    assert dom.count('<div class="uplot') > 6
    assert 'class="state live"' in dom and "running" in dom and "step 12 of 30" in dom
    assert re.search(r"idle: samplers \d+ %, trainer \d+ %, graders \d+ %", dom)
    assert "k3 &lt;script&gt;" in dom and "&lt;b&gt;killed&lt;/b&gt;" in dom
    assert "<img" not in dom and dom.count("<script") == 4


def test_the_board_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe()))
    with served(run) as server:
        dom = dump_dom(server.address, tmp_path / "profile", budget_ms=4000)
    assert "data-error" not in opening(dom)
    assert "has not begun yet" in dom and "No answers are recorded yet" in dom
    assert 'data-charts="0"' in opening(dom) and 'data-lanes="0"' in opening(dom)


# A reader who watches the run grow, chooses a metric, zooms, and looks for answers.
READER = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const at = (id) => document.getElementById(id), root = document.documentElement;
const until = async (what) => { for (let i = 0; i < 200 && !what(); i++) await wait(100); return what(); };
(async () => {
  const seen = {};
  const before = () => at("steps").textContent.startsWith("step 8 of 30");
  await until(() => before() && root.dataset.answers && root.dataset.lanes);
  seen.first = root.dataset.charts;
  const pick = document.querySelector(".pick");
  pick.metric.value = "groups/outstanding";
  pick.metric.dispatchEvent(new Event("change"));
  await until(() => Number(root.dataset.charts) > Number(seen.first));
  seen.chosen = [...document.querySelectorAll("#charts h3")].pop().textContent;
  document.querySelector('[data-do="in"]').click();
  seen.zoomed = document.querySelector("figure.gantt").dataset.window;
  const canvas = document.querySelector("canvas"), top = canvas.getBoundingClientRect().top + 8;
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: 400, clientY: top }));
  seen.under = document.querySelector("figure.gantt .at").textContent;
  const choose = at("choose");
  choose.verdict.value = "solved";
  choose.find.value = "it is 4";
  choose.dispatchEvent(new Event("change"));
  await until(() => root.dataset.answers === "1");
  seen.found = document.querySelector(".answer pre").textContent;
  seen.prompt = document.querySelector(".prompt pre").textContent;
  await fetch("/state?ready=1");
  await until(() => !before());
  seen.grown = at("steps").textContent;
  seen.wide = root.scrollWidth - innerWidth;
  seen.pwned = root.dataset.pwned ?? null;
  seen.error = root.dataset.error ?? null;
  const told = document.createElement("output");
  told.textContent = JSON.stringify(seen);
  document.body.append(told);
})();
"""


@pytest.mark.parametrize("width", [500, 1280])
def test_a_reader_follows_a_run(tmp_path: Path, width: int) -> None:
    run, ready = a_run(tmp_path / "run", 8), threading.Event()
    with served(run, READER) as server:
        state = server.board.routes["/state"]

        def when_asked(asked: Mapping[str, list[str]]) -> dict[str, Any]:
            if "ready" in asked:
                ready.set()
            return state(asked)

        server.board.routes["/state"] = when_asked

        def grow() -> None:
            if ready.wait(60):
                a_step(run, 9)

        growing = threading.Thread(target=grow)
        growing.start()
        dom = dump_dom(server.address, tmp_path / "profile", budget_ms=20_000, width=width)
        ready.set()
        growing.join()
    (found,) = re.findall(r"<output>(.*?)</output>", dom)
    seen = json.loads(html.unescape(found))
    assert seen["error"] is None and seen["pwned"] is None
    assert seen["chosen"] == "groups/outstanding"
    start, stop = map(int, seen["zoomed"].split("-"))
    assert stop - start == pytest.approx(8 * 6000 / 2, abs=2200)  # with the loading before the first step
    assert re.match(r"sampler-0 · \w+ [\d.]+ m?s|step \d+ · |.* shown", seen["under"])
    assert (seen["found"], seen["prompt"]) == ("It is 4.", f"What is 3 + 1? {PROBE}")
    assert seen["grown"].startswith("step 9 of 30")
    assert seen["wide"] <= 0  # nothing to scroll sideways


def test_the_timeline_in_the_report(tmp_path: Path) -> None:
    page = write_report(a_run(tmp_path / "run", 6))
    dom = dump_dom(page.as_uri(), tmp_path / "profile", budget_ms=4000)
    assert "data-error" not in opening(dom) and 'data-lanes="5"' in opening(dom)
    assert 'aria-label="the whole run, 40 s: sampler-0 worked' in dom
    assert re.search(r"<span><i[^>]*></i>decode<b>", dom)
