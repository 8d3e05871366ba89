"""Report and board in a real browser: scripts run, a run is followed, what a model wrote stays text."""

from __future__ import annotations

import html
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import a_browser, dump_dom
from mismatch_rows import mismatch_row, routing_metrics
from pipeline_rows import pipeline_metrics, step_row, step_spans, worker_rows
from small_ledger import a_step, start

from ostinato.config import Recipe, dump_toml
from ostinato.observe.board import Board, Server, open_server
from ostinato.observe.report import write_report
from ostinato.observe.report.page.offline import digest
from ostinato.render import Renderer
from ostinato.run import RunFolder, group_rows
from ostinato.types import Completion, Group, Prompt, Reward, Stop, Trajectory, Turn

pytestmark = pytest.mark.lab

STEPS, EVERY, PROMPTS, SIBLINGS, LAYERS, TOP_K, EXPERTS = 80, 20, 4, 8, 3, 2, 16
PROBE = "</script><img src=x onerror=\"document.documentElement.dataset.pwned='yes'\">"


def renderer(folder: Path) -> Renderer:
    """A byte-level BPE tokenizer of some 400 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["What is the sum? First we add, so the answer is 12 + 34 = 46."] * 3, trainer
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Renderer(folder)


def wave(step: int, speed: float = 3.0) -> float:
    """From 0 towards 1 over the run, with a ripple."""
    return 1 - math.exp(-speed * step / STEPS) + 0.03 * math.sin(step * 2.1)


WAVES = (
    *("reward", "reward_std", "frac_reward_zero_std", "solved_none", "solved_some", "solved_all"),
    *("completions/mean_length", "completions/clipped_ratio", "entropy", "learning_rate", "sampling/ess"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "sampling/sampling_logp_difference/mean"),
    *("sampling/sampling_logp_difference/max", "sampling/kl_k3", "draft/acceptance"),
    *("sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max"),
    *("draft/share_history", "draft/share_sibling", "draft/seconds_saved", "draft/tokens_per_pass"),
    *("time/rollout_s", "time/train_s", "step_time", "flops/rollout", "flops/train", "tokens_per_s"),
)


def metrics(step: int) -> dict[str, float]:
    """A row as the loop writes it, but that everything is between 0 and 1."""
    broken = math.nan if step == 44 else 0.5
    tokens = {
        "sampled": 400.0,
        "trained": 300.0,
        "wasted/truncated": 100.0,
        "drafted": 90.0,
        "accepted": 50.0,
    }
    return {
        **dict.fromkeys(WAVES, max(0.01, wave(step))),
        **{f"tokens/{name}": count for name, count in tokens.items()},
        **{"loss": broken, "grad_norm": broken, "refused_step": float(step == 44)},
        **({"faults/env": 1.0, "rollout/failed": 1.0} if step == 31 else {}),
        **{"rollout/groups": float(PROMPTS), "rollout/trajectories": float(PROMPTS * SIBLINGS)},
        **routing_metrics(step),
    }


def group(step: int, index: int, tokens: Renderer) -> Group:
    """Siblings; one wrote the probe, one was cut off, one called a tool, one failed before it began."""
    noise = np.random.default_rng((step, index))
    a, b = (int(value) for value in noise.integers(10, 99, 2))
    question = f"What is {a} + {b}? Think first, then give the answer as one number."

    def play(sample: int) -> Trajectory:
        if sample == 6:
            return Trajectory(turns=(), stop=Stop.ERROR, seed=(0,), error="env: the tool <b>broke</b>")
        right = noise.random() < 0.3 + 0.5 * wave(step)
        guess = a + b + (0 if right else int(noise.integers(1, 9)))
        words = f"First we add {a} and {b} → é🎼,\nso the answer is {guess}."
        stop = Stop.LENGTH if sample == 3 else Stop.EOS
        answer = PROBE if sample == 1 else words
        ids = [*tokens.encode(answer), *([0] if stop is Stop.EOS else [])]
        experts = noise.integers(0, EXPERTS, (len(ids), LAYERS, TOP_K)).astype(np.int16)
        experts[-1] = -1
        completion = Completion(
            tokens=np.array(ids, np.int32),
            logprobs=-(noise.exponential(0.6, len(ids)).astype(np.float32) ** 2),
            versions=np.full(len(ids), step - 1, np.int32),
            stop=stop,
            text=answer,
            experts=experts,
        )
        value = float(right and sample != 1)
        first = Turn(context=tokens.encode(question), completion=completion)
        second = Turn(context=tokens.encode(f"the tool says {a + b}"), completion=completion)
        return Trajectory(
            turns=(first, second) if sample == 5 else (first,),
            stop=stop,
            seed=(0, step, index, sample),
            reward=Reward(value=value, parts={"exact": value}),
        )

    prompt = Prompt(
        uid=f"arithmetic:{step * PROMPTS + index}",
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": question}),
        columns={"answer": str(a + b), "probe": PROBE},
    )
    return Group(prompt=prompt, trajectories=tuple(play(sample) for sample in range(SIBLINGS)), step=step)


def make_run(path: Path, tokens: Renderer) -> RunFolder:
    """A finished run of 80 steps with one fault and one refused step."""
    tree = {"name": "quickstart", "trainer": {"steps": STEPS}, "eval": {"k": 4}, "algo": {"name": "dr_grpo"}}
    run = RunFolder.create(path, dump_toml(Recipe.parse(tree)))
    for step in range(STEPS + 1):
        if step in (1, 25, 50, 75):
            run.mismatch.append(mismatch_row(step, on=step != 25, growth=1 + step / 60))
        if step:
            run.write(step, metrics(step))
            run.ledger.append(a_step(1, step, 1.76e9 + 10.2 * step))
        else:
            run.ledger.append(start(1, 1.76e9 - 5.0))
        if step % EVERY == 0:
            score = 0.28 + 0.47 * max(0.0, wave(step))
            error = math.sqrt(score * (1 - score) / 256)
            best = {"pass@k": min(0.98, score + 0.2), "pass@k_stderr": 0.02, "k": 4, "samples": 4}
            spread = {"reward": score, "reward_stderr": error, "completions/mean_length": 15.0 - step / 40}
            row = {"step": step, "split": "eval", "n": 256, "excluded": 0, "pass@1": score, "stderr": error}
            run.eval.append({**row, **best, **spread, "completions/clipped_ratio": 0.05})
        if step == 1 or (step and step % 10 == 0):
            groups = [group(step, index, tokens) for index in range(PROMPTS)]
            run.trajectories.append(*(row for one in groups for row in group_rows(one)))
    return run


# A reader who hovers over a word and works the controls, in a narrow window inside a wide one.
READER = """<script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const form = document.querySelector(".controls");
const cards = () => document.querySelectorAll(".answer").length;
(async () => {
  await wait(1500);
  const seen = { wide: document.documentElement.scrollWidth - innerWidth, all: cards() };
  const word = [...document.querySelectorAll(".t")].find((token) => token.textContent.includes("answer"));
  word.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  seen.token = document.getElementById("token").textContent;
  const plot = document.querySelector('[data-chart="entropy"]');
  plot.focus();
  plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home", bubbles: true }));
  seen.step = plot.parentElement.querySelector(".at").textContent;
  form.filter.value = "truncated";
  form.filter.dispatchEvent(new Event("change"));
  seen.truncated = cards();
  form.filter.value = "all";
  form.find.value = "onerror";
  form.find.dispatchEvent(new Event("input"));
  seen.found = cards();
  form.step.value = "1";
  form.step.dispatchEvent(new Event("change"));
  await wait(500);
  seen.groups = form.group.options.length;
  seen.pwned = document.documentElement.dataset.pwned ?? null;
  seen.error = document.documentElement.dataset.error ?? null;
  parent.postMessage(JSON.stringify(seen), "*");
})();
</script>"""
FRAME = """<iframe src="read.html" width="WIDTH" height="800"></iframe><script>
const seen = document.createElement("output");
addEventListener("message", (event) => { seen.textContent = event.data; document.body.append(seen); });
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    a_browser()
    folder = tmp_path_factory.mktemp("report")
    tokens = renderer(folder / "tokenizer")
    return write_report(make_run(folder / "quickstart-20251120-101500", tokens), renderer=tokens)


@pytest.fixture(scope="module")
def dom(page: Path) -> str:
    return dump_dom(page.as_uri(), page.parent / "profile")


def test_scripts_run_without_an_error(dom: str) -> None:
    opening = dom[dom.index("<html") : dom.index(">", dom.index("<html"))]
    assert "data-error" not in opening
    assert f'data-samples="{SIBLINGS}"' in opening
    charts = json.loads(re.findall(r'id="chart-data">(.*?)</script>', dom, re.DOTALL)[0])
    assert f'data-charts="{len(charts)}"' in opening
    assert dom.count('<div class="uplot') == len(charts) > 12


def test_the_browser_of_samples_opens_with_the_last_step(dom: str) -> None:
    assert dom.count('<article class="answer') == SIBLINGS
    assert f'<option value="{STEPS}">{STEPS}</option>' in dom
    assert "truncated</span>" in dom
    assert len(re.findall(r'<span class="t p\d', dom)) > SIBLINGS * 10
    assert "🎼" in dom  # one character of several tokens
    assert "context of turn 2" in dom and "the tool says" in dom


def test_a_failed_episode_is_shown_with_its_reason(dom: str) -> None:
    assert "no verdict" in dom and "nothing was sampled" in dom
    assert "env: the tool &lt;b&gt;broke&lt;/b&gt;" in dom


def test_what_a_model_wrote_is_inert(dom: str) -> None:
    """A completion, a column and a prompt with markup: shown as written, and nothing of it runs."""
    assert "data-pwned" not in dom
    assert "<img" not in dom
    assert "&lt;img src=x onerror=" in dom  # in the column of the row


@pytest.mark.parametrize("width", [390, 1280])
def test_a_reader_hovers_filters_and_searches(page: Path, tmp_path: Path, width: int) -> None:
    """Without the page's policy, which rightly keeps this reader's script out."""
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    text, removed = policy.subn("", page.read_text(encoding="utf-8"))
    assert removed == 1
    (tmp_path / "read.html").write_text(text.replace("</body>", READER + "</body>"), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    dom = dump_dom((tmp_path / "frame.html").as_uri(), tmp_path / "profile")
    (found,) = re.findall(r"<output>(.*?)</output>", dom)
    seen = json.loads(html.unescape(found))
    assert seen["wide"] <= 0  # nothing to scroll sideways
    assert seen["error"] is None and seen["pwned"] is None
    assert '" answer"' in seen["token"] and "log p" in seen["token"]
    assert re.search(r"experts by MoE layer0: \d+ \d+1: \d+ \d+2: \d+ \d+$", seen["token"])
    assert seen["step"] == "step 1"
    assert (seen["all"], seen["truncated"], seen["found"], seen["groups"]) == (SIBLINGS, 1, 1, PROMPTS)


def test_an_empty_run_has_no_script_error(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "empty", dump_toml(Recipe()))
    dom = dump_dom(write_report(run).as_uri(), tmp_path / "profile")
    assert 'data-charts="0"' in dom and 'data-samples="none"' in dom
    assert "data-error" not in dom


# ---- the board in a real browser: it follows a run that grows, and what a model wrote stays text


HOSTILE = "<script>document.documentElement.dataset.pwned='yes'</script><img src=x onerror=\"alert(1)\">"
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


def board_step(run: RunFolder, step: int) -> None:
    """As the loop leaves it; every answer but one of each group is right."""
    base = {"reward": step / 30, "reward_std": 0.2, "loss": -0.01, "entropy": 1 / step, "tokens_per_s": 900.0}
    run.write(
        step, {**base, "sampling/kl_k3": 1e-5, f"rewards/{HOSTILE}/mean": 0.5, **pipeline_metrics(step)}
    )
    run.ledger.append(step_row(step, BEGAN))
    run.timeline.append(*(span.to_json() for span in step_spans(step, BEGAN)))
    prompt = Prompt(
        uid=f"p{step}{HOSTILE}", text=f"What is {step} + 1? {HOSTILE}", columns={"answer": HOSTILE}
    )
    played = (answer(f"It is {step + 1}.", 1.0), answer(HOSTILE, 0.0))
    run.trajectories.append(*group_rows(Group(prompt=prompt, trajectories=played, step=step)))


def a_run(path: Path, steps: int) -> RunFolder:
    run = RunFolder.create(path, dump_toml(Recipe.parse({"name": "quickstart", "trainer": {"steps": 30}})))
    start = {"event": "start", "session": 1, "at": time.time(), "process_started": time.time() - 4, "step": 0}
    run.ledger.append({**start, "pools": {}, "price_per_device_hour": 0, "currency": "USD"})
    beat(run)
    for step in range(1, steps + 1):
        board_step(run, step)
    (path / "workers.json").write_text(json.dumps(worker_rows(time.time())))
    run.watch.append({"step": 2, "since": 1, "collapse": True, "sentence": f"k3 {HOSTILE}"})
    return run


def beat(run: RunFolder) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": "noon"}
    (run.path / ".lock").write_text(json.dumps(holder))


@contextmanager
def served(run: RunFolder, reader: str = "") -> Iterator[Server]:
    """The board of ``run``, with a reader's script in its page, which the page's policy then admits too."""
    server = open_server(Board(run), "127.0.0.1")
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
    assert 'data-samples="2"' in opening(dom)
    assert dom.count('<div class="uplot') > 6
    assert 'class="state live"' in dom and "running" in dom and "step 12 of 30" in dom
    assert re.search(r"idle: samplers \d+ %, trainer \d+ %, graders \d+ %", dom)
    assert "k3 &lt;script&gt;" in dom and "&lt;b&gt;killed&lt;/b&gt;" in dom
    assert "<img" not in dom and dom.count("<script") == 5


def test_the_board_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe()))
    with served(run) as server:
        dom = dump_dom(server.address, tmp_path / "profile", budget_ms=4000)
    assert "data-error" not in opening(dom)
    assert "has not begun yet" in dom and "No answers are recorded yet" in dom
    assert 'data-charts="0"' in opening(dom) and 'data-lanes="0"' in opening(dom)


# A reader who watches the run grow, chooses a metric, zooms, and looks for answers.
FOLLOWER = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const at = (id) => document.getElementById(id), root = document.documentElement;
const until = async (what) => { for (let i = 0; i < 200 && !what(); i++) await wait(100); return what(); };
(async () => {
  const seen = {};
  const before = () => at("steps").textContent.startsWith("step 8 of 30");
  await until(() => before() && root.dataset.samples && root.dataset.lanes);
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
  const choose = document.querySelector("form.samples");
  choose.step.value = "3";
  choose.step.dispatchEvent(new Event("change"));
  await until(() => document.querySelector(".prompt pre").textContent.startsWith("What is 3"));
  choose.filter.value = "solved";
  choose.find.value = "it is 4";
  choose.filter.dispatchEvent(new Event("change"));
  await until(() => document.querySelectorAll(".answer").length === 1);
  seen.found = document.querySelector(".answer pre").textContent;
  seen.prompt = document.querySelector(".prompt pre").textContent;
  await fetch("/state?ready=1");
  await until(() => !before());
  seen.grown = at("steps").textContent;
  seen.wide = root.scrollWidth - innerWidth;
  seen.pwned = root.dataset.pwned ?? null;
  seen.error = root.dataset.error ?? null;
  const reported = document.createElement("output");
  reported.textContent = JSON.stringify(seen);
  document.body.append(reported);
})();
"""


@pytest.mark.parametrize("width", [500, 1280])
def test_a_reader_follows_a_run(tmp_path: Path, width: int) -> None:
    run, ready = a_run(tmp_path / "run", 8), threading.Event()
    with served(run, FOLLOWER) as server:
        assert isinstance(server.board, Board)
        state = server.board.routes["/state"]

        def when_asked(requested: Mapping[str, list[str]]) -> dict[str, Any]:
            if "ready" in requested:
                ready.set()
            return state(requested)

        server.board.routes["/state"] = when_asked

        def grow() -> None:
            if ready.wait(60):
                board_step(run, 9)

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
    assert (seen["found"], seen["prompt"]) == ("It is 4.", f"What is 3 + 1? {HOSTILE}")
    assert seen["grown"].startswith("step 9 of 30")
    assert seen["wide"] <= 0  # nothing to scroll sideways


def test_the_timeline_in_the_report(tmp_path: Path) -> None:
    page = write_report(a_run(tmp_path / "run", 6))
    dom = dump_dom(page.as_uri(), tmp_path / "profile", budget_ms=4000)
    assert "data-error" not in opening(dom) and 'data-lanes="5"' in opening(dom)
    assert 'aria-label="the whole run, 40 s: sampler-0 worked' in dom
    assert re.search(r"<span><i[^>]*></i>decode<b>", dom)
