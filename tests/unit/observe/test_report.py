"""The report: numbers, warnings and plots from rows; samples within a budget; no markup from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import completion, episode, run_data
from small_ledger import a_step, start

from ostinato.cli.report import local_renderer, report
from ostinato.config import Recipe, dump_toml
from ostinato.launch.machine import machine, record_start
from ostinato.model.named import model_folder
from ostinato.observe.report import write_report
from ostinato.observe.report.charts import held_out, sections
from ostinato.observe.report.concerns import concerns
from ostinato.observe.report.facts import (
    Table,
    comparisons,
    difference,
    estimate,
    faults,
    header,
    headline,
    protocol,
    seconds_text,
    si,
    status,
    steps_text,
    waste,
    wilson,
)
from ostinato.observe.report.pictures import MOST, MOST_BYTES, PNG
from ostinato.observe.report.reading import RunData, read_run
from ostinato.observe.report.samples import Chunk, Pieces, choose, pack_samples
from ostinato.observe.report.verdicts import unsolved
from ostinato.render import Renderer
from ostinato.run import RunFolder, group_rows
from ostinato.types import Group, Prompt, Reward, Trajectory

PROBE = "</script><img src=x onerror=alert(1)><!--"


def data(
    *, metrics: Sequence[dict[str, Any]] = (), evals: Sequence[dict[str, Any]] = (), **recipe: Any
) -> RunData:
    return run_data(metrics=metrics, evals=evals, recipe=recipe or {"trainer": {"steps": len(metrics)}})


def row(step: int, **values: Any) -> dict[str, Any]:
    """Metrics of a healthy step; ``tokens__sampled`` stands for "tokens/sampled"."""
    healthy = {
        "reward": 0.5,
        "reward_std": 0.4,
        "frac_reward_zero_std": 0.1,
        "completions/clipped_ratio": 0.01,
        "rollout/trajectories": 16.0,
        "rollout/groups": 4.0,
        "entropy": 1.0,
        "grad_norm": 1.0,
        "sampling/kl_k3": 1e-8,
        "sampling/ess": 1.0,
        "tokens/sampled": 100.0,
        "tokens/trained": 80.0,
    }
    return {"step": step, **healthy, **{name.replace("__", "/"): value for name, value in values.items()}}


def score(step: int, value: float | None, error: float | None = 0.03, **more: Any) -> dict[str, Any]:
    return {"step": step, "split": "eval", "n": 256, "pass@1": value, "stderr": error, **more}


def new_run(path: Path, **sections: Mapping[str, Any]) -> RunFolder:
    tree = {"name": "test", "trainer": {"steps": 3}, **sections}
    return RunFolder.create(path / "run", dump_toml(Recipe.parse(tree)))


def trajectory(
    tokens: list[int], text: str = "", *, reward: float | None = 1.0, experts: bool = False
) -> Trajectory:
    routes = np.ones((len(tokens), 2, 3), np.int16) if experts else None
    logprobs = np.full(len(tokens), -0.12345, np.float32)
    answer = completion(tokens, text=text, logprobs=logprobs, experts=routes)
    return episode(answer, reward=Reward(value=reward, reason="" if reward is not None else "timeout: 10 s"))


def log_group(
    run: RunFolder, step: int, *trajectories: Trajectory, uid: str = "p", prompt: str = "add"
) -> None:
    group = Group(prompt=Prompt(uid=uid, text=prompt), trajectories=trajectories, step=step)
    run.trajectories.append(*group_rows(group))


def test_a_report_is_written_whatever_the_texts_are(tmp_path: Path) -> None:
    """Half of a surrogate pair anywhere in a run left it without a report."""
    run = new_run(tmp_path, model={"path": "asset:seed-moe"})
    run.write(1, row(1))
    log_group(run, 1, trajectory([3, 4], "a\ud83d"), uid="\ude00", prompt="b\ud83d")
    run.watch.append({"step": 1, "rule": "\ud83d", "sentence": "\ud83d"})
    assert "</html>" in write_report(run).read_text(encoding="utf-8")


def opened(chunk: Chunk) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(chunk.data)))


@pytest.fixture(scope="module")
def tokenizer() -> Renderer:
    """Byte-level, so that most characters outside ASCII are several tokens."""
    return Renderer(model_folder("asset:seed-moe"))


class Tags(HTMLParser):
    """The tags of a page, and the texts of its script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data


# -- numbers


def cells(table: Table) -> dict[str, list[str]]:
    """By the names of the lines."""
    return {name.partition("\n")[0]: some for name, *some in table.rows}


def test_the_headline_compares_with_step_zero() -> None:
    head = headline(data(evals=[score(0, 0.3), score(20, 0.9), score(40, 0.7)]))
    assert (head.before, head.after[:7], head.after_step) == ("0.300 [0.245, 0.362]", "0.700 [", 40)
    assert head.change == "+0.400 [+0.313, +0.478]"
    assert head.tone == "good" and "improved" in head.verdict


def test_a_mixture_is_compared_task_by_task() -> None:
    of = [{"tasks": {"sums": score(0, some), "guess": score(0, 0.1)}} for some in (0.2, 0.6)]
    evals = [score(step, 0.4) | each for step, each in zip((0, 9), of, strict=True)]
    metrics = [{"step": 1, "tasks/sums/share": 1.0}, {"step": 2, "tasks/sums/share": 0.5}]
    mixed = {"task": {"mix": [{"name": "sums", "weight": 3.0}, {"name": "guess"}]}}
    found = data(evals=evals, metrics=metrics, **mixed)
    lines = comparisons(found).rows
    assert cells(comparisons(found))["sums, pass@1"][2].startswith("+0.400")
    assert any(name.endswith("75% of all groups of training") for name, *_ in lines)
    assert "sums x 3, guess x 1" in [fact.value for fact in header(found)]


def test_scores_of_the_sampler_are_kept_from_that_of_what_is_exported(tmp_path: Path) -> None:
    """With an int8 sampler the last held-out score was the sampler's, unlabelled."""
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse({"engine": {"weights": "int8"}})))
    rows = [score(0, 0.3) | {"weights": "int8"}, score(9, 0.8) | {"weights": "int8"}]
    run.eval.append(*rows, score(9, 0.9) | {"weights": "model"})
    found = read_run(run)
    assert [row["pass@1"] for row in found.evals] == [0.3, 0.8]
    assert "whose weights are int8" in protocol(found)
    assert "the policy of step 9 has pass@1 0.900 [" in protocol(found)
    assert "exported" not in protocol(data(evals=[score(0, 0.3)]))


@pytest.mark.parametrize(
    ("evals", "words"),
    [
        ([], "No held-out score"),
        ([score(0, 0.3)], "Only the model before"),
        ([score(20, 0.3)], "nothing to compare with"),
        ([score(0, 0.3), score(20, 0.33)], "beyond chance"),
        ([score(0, 0.5), score(20, 0.3)], "got worse"),
        ([score(0, 0.5, None), score(20, 0.9, None)], "no interval"),
        ([score(0, None), score(20, 0.9)], "nothing to compare with"),
    ],
)
def test_every_state_of_the_headline_has_its_sentence(evals: list[dict[str, Any]], words: str) -> None:
    assert words in headline(data(evals=evals)).verdict


def test_intervals_of_shares_stay_inside_zero_and_one() -> None:
    assert wilson(0.0, 0.0, 64) == (0.0, pytest.approx(0.0566, abs=1e-4))  # 3.84 / (64 + 3.84)
    assert wilson(1.0, 0.0, 64) == (pytest.approx(0.9434, abs=1e-4), 1.0)
    assert wilson(0.5, 0.05, 256) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


@given(st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 0.5))
def test_the_interval_of_a_change_contains_it(a: float, a_error: float, b: float, b_error: float) -> None:
    old, new = (estimate(score(0, v, e), "pass@1") for v, e in ((a, a_error), (b, b_error)))
    assert old is not None and new is not None
    change = difference(old, new)
    if change.interval is not None:
        assert change.interval[0] <= change.value <= change.interval[1]


def test_the_table_names_k_and_says_what_is_missing() -> None:
    more = {"pass@k": 0.8, "k": 4, "pass@k_stderr": 0.02, "completions/mean_length": 12.5}
    lines = cells(comparisons(data(evals=[score(20, 0.5, **more)])))
    assert lines["pass@4"] == ["not measured", "0.800 [0.758, 0.836]", ""]
    assert lines["answer length"][1] == "12.5"
    assert lines["mean reward"][1] == "not measured"


def test_waste_is_ordered_and_adds_up_with_what_was_trained_on() -> None:
    rows = [row(1, tokens__wasted__truncated=5.0), row(2, tokens__wasted__zero_variance=15.0)]
    lines = cells(waste(data(metrics=rows)))
    assert list(lines) == ["trained on", "zero_variance", "truncated"]
    assert [share for _, share, _ in lines.values()] == ["80.0 %", "7.5 %", "2.5 %"]
    assert lines["zero_variance"][2] == "2"


def test_faults_that_did_not_happen_are_said() -> None:
    lines = cells(faults(data(metrics=[row(1), row(2, faults__env=2.0)])))
    assert lines["fault: env"][0] == "2" and lines["fault: env"][2] == "2"
    assert lines["episodes failed"][0] == "0" and lines["steps refused"][0] == "0"


def test_what_reward_workers_and_tools_counted_is_listed() -> None:
    rows = [
        row(1, rewards__exact__mean=0.5, rewards__exact__timeout=3.0, tools__calls=9.0),
        row(2, tools__cut=1.0),
    ]
    events = {name: line for name, line in cells(faults(data(metrics=rows))).items() if "event" in name}
    assert events == {"event: rewards/exact/timeout": ["3", "", "1"], "event: tools/cut": ["1", "", "2"]}


def test_words_for_numbers() -> None:
    assert [seconds_text(s) for s in (8.21, 59.97, 245, 12_000, 187_200)] == [
        "8.2 s",
        "1 min 00 s",
        "4 min 05 s",
        "3 h 20 min",
        "2 d 04 h",
    ]
    assert [si(v) for v in (812, 999.9, 81_234, 1.234e15)] == ["812", "1 k", "81.2 k", "1.23 P"]
    assert steps_text([1, 2, 3, 7, 8, 10, 20, 21]) == "1 to 3, 7, 8, 10 and 2 more up to 21"
    assert steps_text([]) == ""


# -- warnings


def test_a_healthy_run_has_no_concern() -> None:
    rows = [row(step) for step in range(1, 41)]
    assert concerns(data(metrics=rows, evals=[score(0, 0.3), score(40, 0.7)])) == []


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"frac_reward_zero_std": 0.7, "solved_none": 0.6}, "look", "70% of groups had equal rewards"),
        ({"refused_step": 1.0}, "bad", "4 steps were refused"),
        ({"empty_step": 1.0}, "look", "(step 37 to 40)"),
        ({"sampling__kl_k3": 0.02, "tokens__trained": 1e3}, "look", "0.02 nats per token at step 40"),
        ({"sampling__ess": 0.5, "tokens__trained": 1e3}, "look", "fell to 50%"),
        ({"rollout__failed": 4.0}, "bad", "16 of 640 answers failed"),
    ],
)
def test_each_concern_names_figure_and_step(change: dict[str, float], level: str, words: str) -> None:
    rows = [row(step, **(change if step > 36 else {})) for step in range(1, 41)]
    (found,) = concerns(data(metrics=rows, evals=[score(0, 0.3), score(40, 0.7)]))
    assert found.level == level
    assert words in found.text


def test_a_mean_over_few_tokens_raises_no_alarm() -> None:
    """The report of a healthy first run began with "Sampler and trainer disagree": k3 of 40 tokens was
    0.0033, which one token at another expert explains. Steps of few tokens are judged together."""
    rows = [
        row(step, tokens__trained=40.0, sampling__kl_k3=0.0033 if step == 7 else 1e-4)
        for step in range(1, 41)
    ]
    scores = [score(0, 0.3), score(40, 0.7)]
    assert concerns(data(metrics=rows, evals=scores)) == []
    many = [
        row(step, tokens__trained=40.0, sampling__kl_k3=0.0033, sampling__ess=0.5) for step in range(1, 41)
    ]
    assert len(concerns(data(metrics=many, evals=scores))) == 2


@pytest.mark.parametrize(("why", "ended"), [("spent", True), ("interrupted", False)])
def test_a_run_that_has_spent_its_budget_is_finished(why: str, ended: bool) -> None:
    """The reports of `ostinato compare` said "Not finished: 24 of 1000000 steps", of runs that had spent
    exactly what they were given."""
    trainer = {"steps": 10**6, "budget": "2e12 flops"}
    end = {"event": "end", "session": 1, "at": 2.0, "step": 24, "why": why}
    run = replace(
        data(metrics=[row(24)], evals=[score(0, 0.3), score(24, 0.7)], trainer=trainer), ledger=[end]
    )
    assert [one.level for one in concerns(run)] == ([] if ended else ["note"])
    assert status(run, datetime.now(UTC))[1] == ("good" if ended else "open")
    begun = replace(run, ledger=[end, {"event": "start", "session": 2, "at": 3.0, "step": 24}])
    assert status(begun, datetime.now(UTC))[1] == "open"


def test_a_score_that_fell_from_its_peak_is_the_first_concern() -> None:
    rows = [row(1, frac_reward_zero_std=0.9)]
    found = concerns(data(metrics=rows, evals=[score(0, 0.3), score(20, 0.8), score(40, 0.4)]))
    assert "peaked at step 20" in found[0].text


# -- plots


def test_what_is_not_a_number_is_a_gap() -> None:
    rows = [row(1), row(2, entropy=None), row(3, entropy="nan"), row(4, entropy=math.inf)]
    charts = {chart.key: chart for section in sections(data(metrics=rows)) for chart in section.charts}
    assert charts["entropy"].series[0].values == [1.0, None, None, None]


def test_a_chart_without_data_is_a_sentence() -> None:
    charts = {chart.key: chart for section in sections(data(metrics=[row(1)])) for chart in section.charts}
    assert charts["flops"].empty == "Not recorded in this run."
    assert not charts["reward"].empty
    assert all(chart.empty for section in sections(data()) for chart in section.charts)
    assert "eval.jsonl" in held_out(data()).empty


# -- samples


def test_rewards_and_routes_reach_the_page(tmp_path: Path, tokenizer: Renderer) -> None:
    run = new_run(tmp_path)
    tokens = [int(token) for token in tokenizer.encode("the answer")]
    log_group(run, 1, trajectory(tokens, "the answer", experts=True), trajectory(tokens, reward=None))
    packed = pack_samples(run.trajectories, tokenizer)
    assert (packed.recorded, packed.shown, packed.cut_tokens, packed.damage) == (2, 2, 0, "")
    assert packed.chunks[0].rewards == (1.0, None)
    first, second = opened(packed.chunks[0])["answers"]
    (turn,) = first["turns"]
    assert "".join(turn["pieces"]) == "the answer"
    assert turn["routing"] == [2, 3] and len(turn["experts"]) == 6 * len(tokens)
    assert turn["logprobs"] == [-0.123] * len(tokens) and turn["versions"] == [0] and turn["injected"] == []
    assert second["reason"].startswith("timeout") and second["turns"][0]["experts"] is None


def test_what_was_put_in_is_shown_as_such(tmp_path: Path) -> None:
    """It has no log-probability: its 0 would have looked like certainty, and its version -1 like a policy."""
    run = new_run(tmp_path)
    reported = trajectory([5, 6, 7, 8], "hi")
    injected = np.array([False, True, True, False])
    completion = replace(
        reported.turns[0].completion, injected=injected, versions=np.where(injected, -1, 3).astype(np.int32)
    )
    log_group(run, 1, replace(reported, turns=(replace(reported.turns[0], completion=completion),)))
    (turn,) = opened(pack_samples(run.trajectories, None).chunks[0])["answers"][0]["turns"]
    assert (turn["injected"], turn["versions"]) == ([1, 2], [3])
    assert turn["logprobs"] == [-0.123, None, None, -0.123]


def test_overlong_answers_are_cut_and_counted(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log_group(run, 1, trajectory(list(range(3000))))
    packed = pack_samples(run.trajectories, None)
    assert packed.cut_tokens == 3000 - 2048
    (turn,) = opened(packed.chunks[0])["answers"][0]["turns"]
    assert turn["num_tokens"] == 3000 and len(turn["tokens"]) == 2048


def test_the_budget_is_kept_and_every_step_is_seen(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    noise = np.random.default_rng(0)
    for step in range(1, 9):
        for index in range(4):
            log_group(run, step, trajectory(noise.integers(0, 9999, 200).tolist()), uid=f"p{index}")
    packed = pack_samples(run.trajectories, None, budget=20_000)
    assert sum(len(chunk.data) for chunk in packed.chunks) <= 20_000
    assert {chunk.step for chunk in packed.chunks} == set(range(1, 9))
    assert packed.recorded == 32 and packed.shown == len(packed.chunks) < 32


def test_the_same_prompt_twice_in_a_step_is_two_groups(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for _ in range(2):
        log_group(run, 1, trajectory([1]), trajectory([2]))
    assert [len(chunk.rewards) for chunk in pack_samples(run.trajectories, None).chunks] == [2, 2]


def test_a_torn_log_shows_what_is_whole_and_a_damaged_one_says_so(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log_group(run, 1, trajectory([1]))
    whole = run.trajectories.path.read_bytes()
    for end in (whole[: len(whole) // 2], bytes(4096)):
        run.trajectories.path.write_bytes(whole + end)
        packed = pack_samples(run.trajectories, None)
        assert packed.shown == 1 and packed.damage == ""
    run.trajectories.path.write_bytes(whole + b"no frame at all" + whole)
    packed = pack_samples(run.trajectories, None)
    assert packed.shown == 1 and "damaged" in packed.damage


@given(
    st.dictionaries(st.integers(1, 30), st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1),
    st.integers(1, 300),
)
def test_choose_fills_the_budget_evenly(sizes: dict[int, list[int]], budget: int) -> None:
    def chunk(step: int, size: int) -> Chunk:
        return Chunk(step=step, uid="", preview="", rewards=(), cut_tokens=0, data="x" * size)

    kept = choose({step: [chunk(step, s) for s in given_] for step, given_ in sizes.items()}, budget)
    total = sum(len(one.data) for chunks in kept.values() for one in chunks)
    assert kept and (total <= budget or sum(map(len, kept.values())) == 1)
    if sum(sum(values) for values in sizes.values()) <= budget:
        assert {step: len(chunks) for step, chunks in kept.items()} == {s: len(v) for s, v in sizes.items()}


@given(text=st.text(max_size=30))
def test_pieces_join_to_the_text(text: str, tokenizer: Renderer) -> None:
    tokens = [int(token) for token in tokenizer.encode(text)]
    pieces = Pieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


# -- the page


def test_what_others_wrote_never_becomes_markup(tmp_path: Path, tokenizer: Renderer) -> None:
    """A completion, a prompt, a recipe's system prompt, a fault's and a worker's name that try to leave their
    place."""
    run = new_run(tmp_path, task={"system_prompt": PROBE})
    run.timeline.append({"worker": PROBE, "kind": "decode", "from": 1.0, "to": 2.0})
    run.write(1, row(1, **{f"faults__{PROBE}": 1.0}))
    log_group(run, 1, trajectory([int(t) for t in tokenizer.encode(PROBE)], PROBE), prompt=PROBE, uid=PROBE)
    page = write_report(run, renderer=tokenizer).read_text(encoding="utf-8")
    found = Tags(page)
    assert "img" not in {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert sum(tag == "script" for tag, _ in found.tags) == 8  # three of data, one chunk, four of code
    index = json.loads(found.scripts[1])
    assert index["groups"][0]["uid"] == PROBE


def test_the_page_admits_its_own_scripts_and_nothing_from_outside(tmp_path: Path) -> None:
    page = write_report(new_run(tmp_path)).read_text(encoding="utf-8")
    found = Tags(page)
    policy = next(
        a["content"] for tag, a in found.tags if tag == "meta" and "content" in a and a.get("http-equiv")
    )
    assert policy is not None and "default-src 'none'" in policy
    for script in found.scripts[-4:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not [a for _, a in found.tags if "src" in a or (a.get("href") or "#")[0] != "#"]
    assert not re.findall(r"url\(|@import", page)


def test_a_killed_run_with_torn_and_broken_logs_renders(tmp_path: Path) -> None:
    """Rows cut in the middle, nulls where numbers were, a broken line: each shows as far as it goes."""
    run = new_run(tmp_path, adapter={"kind": "full"})
    run.write(1, row(1, reward=math.nan))
    run.write(2, row(2))
    with run.metrics.path.open("ab") as file:
        file.write(b'{"step": 3, "rew')
    run.eval.path.write_text('{"step": 0, "split": "eval", "pass@1": null}\nnot json\n{"step": 2}\n')
    run.ledger.append(start(1, 1.7e9), a_step(1, 1, 1.7e9 + 15), a_step(1, 2, 1.7e9 + 25))
    with run.ledger.path.open("ab") as file:
        file.write(b"5\n")
    run.trajectories.path.write_bytes(b"\x00damaged")
    page = write_report(run).read_text(encoding="utf-8")
    assert "2 of 3 steps" in page and "all parameters" in page
    assert "line 2 of" in page and "is not JSON" in page
    assert "line 4 of" in page and "is no JSON object" in page
    assert "2023-11-14 22:13 to 22:13 UTC" in page


def test_a_dense_finished_run_renders_and_lands_where_asked(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for step in (1, 2, 3):
        run.write(step, row(step))
    for step in (0, 3):
        run.eval.append(score(step, 0.3 + 0.1 * step))
    log_group(run, 3, trajectory([1, 2]))
    record_start(run, "CUDA device X")
    out = report(run.path, tmp_path / "elsewhere.html")
    page = out.read_text(encoding="utf-8")
    assert out == tmp_path / "elsewhere.html" and not run.report.exists()
    assert "finished, 3 steps" in page and "0.600" in page and "CUDA device X" in page
    assert socket.gethostname() not in machine()


def test_what_is_missing_to_a_solved_answer_can_be_seen() -> None:
    """ "The highest reward was 2, and an answer is solved from 2 on": it was 1.998."""
    sentence = unsolved([score(0, 0.0, 0.0, reward=1.0, reward_max=1.998, solved_at=1.999999)])
    assert "1.998" in sentence and "from 2 on" in sentence


def test_a_report_has_mean_reward_greedy_score_and_what_failed(tmp_path: Path) -> None:
    """pass@1 was the only score of a run whose second reward never gave full marks, and the cause of rewards
    without a verdict was not in the report at all."""
    run = new_run(tmp_path)
    for step in (0, 3):
        run.write(step or 1, row(step or 1))
        beside = {"reward": 0.5 + step / 10, "reward_stderr": 0.01, "reward_max": 1.5, "solved_at": 1.999999}
        run.eval.append(score(step, 0.0, 0.0, set="eval", **beside))
        run.eval.append(score(step, 0.61 + step / 10, set="greedy", **beside))
    failed = {
        "function": "graded",
        "count": 16,
        "of": 64,
        "detail": "raised: KeyError: 'gold' (rewards.py:3)",
    }
    failed |= {"trace": f"Traceback of {PROBE}", "uid": "p1", "completion": PROBE, "stopped": False}
    run.failed.append({"step": 2, "part": "train", **failed})
    found = read_run(run)
    assert [one["step"] for one in found.greedy] == [0, 3] and not found.downstream
    reward, greedy = headline(found).beside
    assert reward == "mean reward 0.500 [0.480, 0.520] → 0.800 [0.780, 0.820]"
    assert greedy.startswith("pass@1, greedy 0.610 [") and " → 0.910 [" in greedy
    warned = [concern.text for concern in concerns(found)]
    assert any("No held-out answer was ever solved" in text and "from 2 on" in text for text in warned)
    assert any("graded gave no verdict to 16 answers, the last time at step 2" in text for text in warned)
    page = write_report(run).read_text(encoding="utf-8")
    assert "Traceback of" in page and PROBE not in page
    assert "No held-out answer" not in " ".join(one.text for one in concerns(data(evals=[score(0, 0.3)])))


def test_pictures_of_the_run_folder_are_in_the_page(tmp_path: Path) -> None:
    """By name, and whole; what is no PNG, too large or one too many is named and not shown."""
    run = new_run(tmp_path)
    assert "Pictures" not in write_report(run).read_text(encoding="utf-8")
    pictures = run.path / "pictures"
    pictures.mkdir()
    for name, content in {
        "1 before": PNG + b"first",
        "2 <b>": PNG + b"last",
        "a text": b"<svg onload=alert(1)>",
        "large": PNG + bytes(MOST_BYTES),
    }.items():
        (pictures / f"{name}.png").write_bytes(content)
    page = write_report(run).read_text(encoding="utf-8")
    found = [a for tag, a in Tags(page).tags if tag == "img"]
    assert [a["alt"] for a in found] == ["1 before", "2 <b>"]
    prefix = "data:image/png;base64,"
    assert [base64.b64decode((a["src"] or "").removeprefix(prefix)) for a in found] == [
        PNG + b"first",
        PNG + b"last",
    ]
    assert "Left out: a text.png (no PNG), large.png (too large or empty)." in page
    assert "img-src data:" in page
    for k in range(MOST):
        (pictures / f"0 {k:02d}.png").write_bytes(PNG)
    assert "2 &lt;b&gt;.png (more than 12)" in write_report(run).read_text(encoding="utf-8")


def test_of_rows_for_one_step_the_last_counts(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.write(1, {"reward": 0.1})
    run.write(1, {"reward": 0.2})
    assert [one["reward"] for one in read_run(run).metrics] == [0.2]


def test_a_model_that_is_not_here_costs_the_tokens_text_only(tmp_path: Path) -> None:
    for path in (str(tmp_path / "moved"), "some-one/never-downloaded"):
        run = RunFolder.create(
            tmp_path / path.replace("/", "-"), dump_toml(Recipe.parse({"model": {"path": path}}))
        )
        assert local_renderer(run) is None
