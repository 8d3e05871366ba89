"""The report in a real browser: its scripts run, its samples open, and what a model wrote stays text."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from browsers import a_browser, dump_dom
from mismatch_rows import mismatch_row, routing_metrics
from small_ledger import a_step, start

from ostinato.config import Recipe, dump_toml
from ostinato.observe.report import write_report
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


def metrics(step: int) -> dict[str, float]:
    """A row as the loop writes it."""
    some, every = 0.35 + 0.2 * math.sin(step / 12), 0.55 * max(0.0, wave(step))
    sampled, truncated = 4200.0 - 18 * step, 0.04 + 0.02 * math.sin(step)
    wasted = {"zero_variance": round(sampled * max(0.0, 1 - some)), "truncated": round(sampled * truncated)}
    times = {"rollout": 1.3 + 0.1 * math.sin(step), "reward": 0.05, "train": 0.8, "other": 0.03}
    gap = 2e-5 * (1 + 0.5 * math.sin(step / 3))
    return {
        "reward": 0.25 + 0.5 * wave(step),
        "reward_std": 0.35 - 0.2 * wave(step),
        "frac_reward_zero_std": max(0.0, 1 - some),
        "solved_none": 1 - some - every,
        "solved_some": some,
        "solved_all": every,
        "completions/mean_length": 16.0 + 3 * math.sin(step / 9),
        "completions/min_length": 5.0,
        "completions/max_length": 48.0,
        "completions/clipped_ratio": truncated,
        "rollout/groups": float(PROMPTS),
        "rollout/trajectories": float(PROMPTS * SIBLINGS),
        "rollout/failed": float(step == 31),
        "rollout/no_verdict": 0.0,
        **({"faults/env": 1.0} if step == 31 else {}),
        "groups/dropped": 1.0,
        "groups/dropped/zero_variance": 1.0,
        "tokens/sampled": sampled,
        "tokens/trained": sampled - sum(wasted.values()),
        **{f"tokens/wasted/{name}": float(count) for name, count in wasted.items()},
        "empty_step": 0.0,
        "refused_step": float(step == 44),
        "loss": math.nan if step == 44 else -0.01,
        "entropy": 1.1 - 0.6 * wave(step),
        "grad_norm": math.nan if step == 44 else 0.5 + 0.2 * math.sin(step),
        "learning_rate": 1e-3 * min(1.0, step / 5),
        "clip_ratio/low_mean": 0.004,
        "clip_ratio/high_mean": 0.007 + 0.002 * math.sin(step),
        "sampling/sampling_logp_difference/mean": gap,
        "sampling/sampling_logp_difference/max": 40 * gap,
        "sampling/kl_k3": gap * gap,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/importance_sampling_ratio/min": 1 - 40 * gap,
        "sampling/importance_sampling_ratio/max": 1 + 40 * gap,
        "sampling/ess": 1 - gap,
        "flops/useful": 5e10,
        "flops/wasted": 3e10,
        "step_time": sum(times.values()),
        "tokens_per_s": sampled / sum(times.values()),
        **{f"time/{name}_s": seconds for name, seconds in times.items()},
        "total/seconds": 2.2 * step,
        "total/sampled_tokens": 3500.0 * step,
        "total/trained_tokens": 1400.0 * step,
        "total/useful_flops": 5e10 * step,
        "total/wasted_flops": 3e10 * step,
        **drafting(step, sampled),
        **routing_metrics(step),
    }


def drafting(step: int, sampled: float) -> dict[str, float]:
    """Four epochs of twenty steps: history begins with the second."""
    past = 0.0 if step <= 20 else 0.3 + 0.002 * step
    shares = {"history": past, "sibling": 0.12, "own": 0.05, "other": 0.03 - 0.0002 * step}
    guessed = sum(shares.values())
    epochs = {"draft/reuse": 0.6 + 0.002 * step, "draft/length_rank_correlation": 0.7 + 0.03 * math.sin(step)}
    return {
        "tokens/drafted": 1.15 * guessed * sampled,
        "tokens/accepted": guessed * sampled,
        "draft/tokens_per_pass": 1 / (1 - guessed),
        "draft/drafted_per_pass": 1.15 * guessed / (1 - guessed),
        "draft/acceptance": 1 / 1.15,
        **{f"draft/share_{name}": share for name, share in shares.items()},
        "draft/cpu_share": 0.021,
        "draft/seconds_saved": 0.9 * guessed,
        "draft/history_tokens": 5e5,
        "draft/history_bytes": 5e6,
        **(epochs | {"draft/length_rank_moved": 0.2} if step > 20 else {}),
    }


def draft_detail(step: int) -> dict[str, object]:
    labels = [0, 3, 10, 25, 40, 60, 90, 180, 420, 2100]
    passes = [(max(1, 32 - i // 2), 30 - i // 3, 60 - i // 2) for i in range(70)]
    return {
        "step": step,
        "labels": labels,
        "hits": [round(n * (i + 0.4) / 10) for i, n in enumerate(labels)],
        "predicted": [n * (i + 0.5) / 10 for i, n in enumerate(labels)],
        "drafted_at": [900, 800, 650, 400, 120],
        "accepted_at": [810, 700, 560, 330, 96],
        "trace": [list(map(float, point)) for point in passes],
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
            run.drafts.append(draft_detail(step))
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
