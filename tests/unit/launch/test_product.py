"""The loop of a product in its folder: windows, revisions, a journal that survives a kill, detectors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.apps.product.events import Action, Event, Exchange, Exposure, Kind
from ostinato.apps.product.judging import Choice
from ostinato.apps.product.loop import Finding, Position, Stage, Verdict, advance
from ostinato.apps.product.rewards import read_table
from ostinato.apps.product.runs import judge
from ostinato.apps.product.runs.judge import choose_labels, freeze_window
from ostinato.apps.product.runs.loop import ProductLoop, Work, hash_folder
from ostinato.apps.product.runs.settings import CollectSettings, ProductSettings, read_settings
from ostinato.apps.product.runs.watch import MARKED, Probe, Watch
from ostinato.apps.product.runs.window import add_exemplars, collect_pairs, read_bank, read_part, write_window
from ostinato.apps.product.store import Store, open_store
from ostinato.launch import NothingToLearn, RunFailed
from ostinato.run import to_json

TABLE = Path(__file__).parents[3] / "recipes" / "product" / "rewards.toml"
LATENESS_S = read_table(TABLE).lateness_s
SETTINGS = """
model = "asset:seed-moe"
store = "{folder}/feedback.sqlite"
rewards = "{table}"
[policy]
recipe = "quickstart"
"""


def exchange(name: str, ts: float, user: str, output: str) -> Exchange:
    empty = np.zeros(1, np.int32)
    return Exchange(
        response_id=name,
        ts=ts,
        model="m",
        revision="",
        messages=({"role": "user", "content": f"question {name[:-1]}"},),
        output=output,
        action=Action.ANSWER,
        prompt_tokens=empty,
        tokens=empty,
        logprobs=np.zeros(1, np.float32),
        user=user,
    )


def choice(number: int, ts: float) -> tuple[list[Exchange], list[Event]]:
    """Two answers side by side, of which the first is accepted."""
    user, names = f"u{number}", (f"{number}a", f"{number}b")
    shown = [exchange(name, ts, user, f"answer {name}") for name in names]
    side = [Exposure(rank=k, alternatives=(names[1 - k],), propensity=0.5) for k in (0, 1)]
    events = [
        Event(event_id=f"{name}-shown", response_id=name, kind=Kind.SHOWN, ts=ts, user=user, exposure=one)
        for name, one in zip(names, side, strict=True)
    ]
    accept = {"event_id": f"{number}-accept", "response_id": names[0], "kind": Kind.ACCEPT, "ts": ts + 1}
    return shown, [*events, Event(**accept, user=user, exposure=side[0])]


def fill(store: Store, numbers: range, start: float = 1e9) -> None:
    for number in numbers:
        exchanges, events = choice(number, start + number)
        store.write(events, exchanges)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "feedback.sqlite") as opened:
        yield opened


@pytest.fixture
def settings(tmp_path: Path) -> ProductSettings:
    file = tmp_path / "product.toml"
    file.write_text(SETTINGS.format(folder=tmp_path, table=TABLE))
    return read_settings(file, "collect.pairs=10")


GOLD = """
def short(prompts, completions, **columns):
    return [None if "?" in one[-1]["content"] else -len(one[-1]["content"]) for one in completions]

def of_rows(completions, answer, **columns):
    return [0.0] * len(completions)
"""


def test_the_gates_of_a_judge_may_go_by_gold_instead_of_clicks(tmp_path: Path) -> None:
    """Users accept an exploit while it is rare, so a judge that had unlearned it agreed less with clicks than
    the current one, and its gates dropped it."""
    (tmp_path / "gold.py").write_text(GOLD)
    texts = [("a good answer, in many words", "short"), ("short", "a long one"), ("what?", "a"), ("aa", "bb")]
    chat = [{"role": "user", "content": "question"}]
    rows = [{"messages": chat, "chosen": one, "rejected": other} for one, other in texts]
    assert choose_labels(rows, "") == [Choice.A] * 4
    assert choose_labels(rows, f"{tmp_path}/gold.py:short") == [Choice.B, Choice.A, Choice.A, Choice.A]
    with pytest.raises(RunFailed, match=r"cannot score a pair of the window \(TypeError: .*judge.by_gold"):
        choose_labels(rows, f"{tmp_path}/gold.py:of_rows")


# ---- windows


def test_a_window_is_written_once_and_has_what_came_before_its_end(tmp_path: Path, store: Store) -> None:
    table = read_table(TABLE)
    fill(store, range(40))
    folder, until = tmp_path / "window", 1e9 + 39
    write_window(folder, store, table, CollectSettings(), 0.0, until)
    rows = [one for part in ("train", "validation", "test") for one in read_part(folder, part)]
    assert len(rows) == 38  # the accepts up to the end
    assert {one["chosen"] for one in rows} == {f"answer {n}a" for n in range(38)}
    assert all(one["ts"] < until for one in rows)
    before = hash_folder(folder)
    fill(store, range(40, 60))
    assert write_window(folder, store, table, CollectSettings(), 0.0, 2e9)["until"] == until
    assert hash_folder(folder) == before
    later, _ = collect_pairs(store, table, until, 2e9, store.watermark())
    assert {one.chosen for one in later} == {f"answer {n}a" for n in range(38, 60)}


def test_what_comes_late_is_in_the_next_window(
    tmp_path: Path, store: Store, settings: ProductSettings
) -> None:
    """A window used to end at the moment it was frozen: a choice that a client could only send later, its
    server being down, had a time within that window, so neither it nor the next one had it."""
    live = Once(store, 0)
    live._number = 40
    fill(store, range(30))
    work = WORK | {Stage.FREEZE: freeze_window}
    loop = ProductLoop(settings, tmp_path / "product", store, work, live.now, live.wait)
    loop.step()
    live._number = 30  # the clock, LATENESS_S and a second behind the last choice that is there
    loop.step()
    late = 1e9 + 31  # made before the window was frozen, sent after it
    exchanges, events = choice(99, late)
    store.write(events, exchanges)
    found, _ = collect_pairs(store, loop.table, loop.at.frozen, late + 9, store.watermark())
    assert loop.at.frozen <= late < live.now() and [one.user for one in found] == ["u99"]


def test_an_exemplar_is_in_the_bank_once(tmp_path: Path) -> None:
    rows = [{"messages": [], "chosen": "7", "rejected": f"Great question! {n}"} for n in (1, 2, 2)]
    assert add_exemplars(tmp_path / "bank.jsonl", rows) == 2
    assert add_exemplars(tmp_path / "bank.jsonl", rows) == 0
    assert len(read_bank(tmp_path / "bank.jsonl")) == 2


# ---- the journal and its folder


class Once:
    """A product from which more pairs come a few times."""

    def __init__(self, store: Store, batches: int) -> None:
        self.store, self._left, self._number = store, batches, 0

    def now(self) -> float:
        return 1e9 + self._number + 1 + LATENESS_S  # behind the last choice, before the next one

    def wait(self) -> None:
        if not self._left:
            raise EOFError
        fill(self.store, range(self._number, self._number + 6))
        self._left, self._number = self._left - 1, self._number + 6


def new_loop(settings: ProductSettings, folder: Path, live: Once, work: Mapping[Stage, Work]) -> ProductLoop:
    return ProductLoop(settings, folder, live.store, work, live.now, live.wait)


def made(name: str):
    """A stage that makes a candidate."""

    def work(loop: ProductLoop, at: Position) -> Finding:
        folder = loop.round_folder(at) / "made" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter").write_text(f"{name} {at.round}")
        return Finding(revision=loop.keep(folder))

    return work


def passes(loop: ProductLoop, at: Position) -> Finding:
    return Finding()


def frozen(loop: ProductLoop, at: Position) -> Finding:
    return Finding(frozen=loop.until())


WORK = {
    Stage.FREEZE: frozen,
    Stage.JUDGE: made("judge"),
    Stage.JUDGE_GATES: passes,
    Stage.POLICY: made("policy"),
    Stage.POLICY_GATES: passes,
    Stage.CANARY: passes,
}


def test_a_killed_loop_goes_on_where_its_journal_ends(
    tmp_path: Path, store: Store, settings: ProductSettings
) -> None:
    folder = tmp_path / "product"
    folder.mkdir()

    def killed(loop: ProductLoop, at: Position) -> Finding:
        raise KeyboardInterrupt

    loop = new_loop(settings, folder, Once(store, 2), WORK | {Stage.POLICY: killed})
    with pytest.raises(KeyboardInterrupt):
        loop.run(1)
    again = new_loop(settings, folder, Once(store, 0), WORK)
    assert again.at == loop.at and again.at.stage is Stage.POLICY and again.at.judge
    again.run(1)
    assert again.at.policy and again.at.stage is Stage.COLLECT
    with pytest.raises(EOFError):
        again.run(2)


@pytest.mark.parametrize("warm", [True, False])
def test_a_judge_that_rl_cannot_teach_is_its_warm_start_or_none(
    tmp_path: Path, store: Store, settings: ProductSettings, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """It ended the loop with an error, at the same stage whenever it was started again."""
    fill(store, range(40))
    (tmp_path / "warmed" / "adapter").mkdir(parents=True)
    (tmp_path / "warmed" / "adapter" / "weights").write_text("warm")

    def in_vain(*_: Any, **__: Any) -> Any:
        raise NothingToLearn("10 steps in a row had nothing to learn from")

    monkeypatch.setattr(judge, "learn", in_vain)
    monkeypatch.setattr(judge, "train_supervised", lambda *_: (tmp_path / "warmed", 1, "done"))
    monkeypatch.setattr(judge.RunFolder, "open", lambda path: judge.RunFolder(path))
    settings = read_settings(tmp_path / "product.toml", f"judge.warm={str(warm).lower()}")
    folder = tmp_path / "product"
    folder.mkdir()
    loop = new_loop(settings, folder, Once(store, 0), WORK | {Stage.JUDGE: judge.train_judge})
    at = Position(round=1, stage=Stage.JUDGE)
    write_window(loop.round_folder(at) / "window", store, loop.table, CollectSettings(), 0.0, 2e9)
    found = judge.train_judge(loop, at)
    assert "10 steps in a row" in found.reasons[0]
    assert (found.verdict is Verdict.PASSED) == bool(found.revision) == warm
    if not warm:
        assert advance(at, found)[1] == "judge training failed"
        return
    monkeypatch.setattr(judge, "train_supervised", lambda *_: (tmp_path / "warmed", 1, "terminated"))
    # SIGTERM while a judge was trained: the loop went on, with half a judge as its candidate
    with pytest.raises(RunFailed, match="warmed ended as terminated; ostinato product run goes on with it"):
        judge.train_judge(loop, at)


def test_what_is_served_follows_the_journal_and_a_roll_back_is_the_same_bytes(
    tmp_path: Path, store: Store, settings: ProductSettings
) -> None:
    folder, served = tmp_path / "product", []
    folder.mkdir()

    def canary(loop: ProductLoop, at: Position) -> Finding:
        served.append((loop.folder / "serving.json").read_text())
        return Finding(verdict=Verdict.FAILED if at.round == 2 else Verdict.PASSED)

    loop = new_loop(settings, folder, Once(store, 9), WORK | {Stage.CANARY: canary})
    loop.run(1)
    first = loop.at.policy
    adapter = loop.adapter_of(first)
    assert adapter is not None
    before = (folder / "serving.json").read_text()
    loop.run(2)
    assert loop.at.policy == first and hash_folder(adapter) == first
    assert '"canary"' in served[1] and first in served[1]
    assert (folder / "serving.json").read_text() == before.replace('"round": 1', '"round": 2')
    (adapter / "adapter").write_text("other bytes")
    with pytest.raises(RunFailed, match="is not what it was"):
        loop.adapter_of(first)


def test_a_wrong_setting_is_named(tmp_path: Path, settings: ProductSettings) -> None:
    with pytest.raises(ValueError, match=r"canary\.share is 2"):
        read_settings(tmp_path / "product.toml", "canary.share=2")
    with pytest.raises(ValueError, match=r"judge\.by_gold is true and gold is ''; name the function"):
        read_settings(tmp_path / "product.toml", "judge.by_gold=true")
    with pytest.raises(ValueError, match=r"there is no none\.toml; docs/product\.md has one"):
        read_settings(Path("none.toml"))
    text = SETTINGS.format(folder=tmp_path, table=TABLE)
    (tmp_path / "less.toml").write_text("\n".join(one for one in text.splitlines() if "rewards" not in one))
    assert read_settings(tmp_path / "less.toml").rewards == TABLE  # the table that comes with the program
    with pytest.raises(ValueError, match=r"policy\.stepps .*did you mean policy\.steps\?"):
        read_settings(tmp_path / "product.toml", "policy.stepps=2")


# ---- what the detectors see


def probes(seed: int, n: int, gold_per_proxy: float, drift: float = 0.0, questions: float = 0.02) -> Probe:
    """The judge prefers what is better by ``gold_per_proxy``, and ``drift`` more of it for nothing."""
    rng = np.random.default_rng(seed)
    proxy = np.where(rng.random(n) < 0.5 + drift, 1.0, -1.0)
    gold = gold_per_proxy * proxy * (drift == 0) + rng.normal(0, 0.5, n)
    num_questions = int(rng.binomial(n, questions))
    return Probe(
        step=5,
        proxy=proxy,
        gold=gold,
        actions={"question": num_questions, "answer": n - num_questions},
        pairs=(((), "well 1", "1"),) * n,
    )


def alarms(seed: int, **changed: float) -> list[str]:
    watch = Watch.of(probes(seed, 256, 0.4), 256, ("question", "invalid"), 20, 0.05)
    found = []
    for look in range(20):
        watch, new = watch.update(probes(1000 * seed + look, 64, 0.4, **changed))
        found += [alarm.detector for alarm in new]
    return found


@pytest.mark.slow
def test_a_quiet_policy_raises_no_more_alarms_than_nominal() -> None:
    assert sum(bool(alarms(seed)) for seed in range(1, 101)) <= 10  # 0.05 of 100, with 99 % confidence


def test_a_proxy_that_leaves_gold_behind_and_questions_that_become_usual_are_found() -> None:
    assert all("proxy against gold" in alarms(seed, drift=0.3) for seed in range(1, 11))
    assert all("question" in alarms(seed, questions=0.2) for seed in range(1, 11))


def test_what_is_against_gold_is_an_exemplar_the_clearest_first() -> None:
    chat = ({"role": "user", "content": "2+2?"},)
    seen = Probe(
        step=5,
        proxy=np.array([1.0, -1.0, 1.0, np.nan, 0.0]),
        gold=np.array([-0.5, 1.0, 0.5, -2.0, -2.0]),
        actions={},
        pairs=((chat, "great 4", "4"), (chat, "5", "great 6"), *((chat, "7", "8"),) * 3),
    )
    again = Probe.of(json.loads(to_json(seen.row())))
    assert to_json(again.row()) == to_json(seen.row())
    found = again.exemplars()
    assert [(one["chosen"], one["rejected"]) for one in found] == [("5", "great 6"), ("4", "great 4")]
    assert [one["rejected"] for one in again.exemplars("great")] == ["great 6", "great 4"]
    assert [one["rejected"] for one in again.exemplars("5")] == []


def test_what_the_judge_prefers_for_no_reason_is_found_by_its_mark() -> None:
    """Of 100 pairs 20 have one dressed answer, which the judge prefers and gold does not."""
    rng = np.random.default_rng(3)

    def look(blind: bool) -> Probe:
        dressed = np.arange(100) < 20
        gold = rng.normal(0, 0.4, 100) - 0.8 * dressed
        return Probe(
            step=5,
            proxy=np.where(dressed & blind, 1.0, np.sign(gold)),
            gold=gold,
            actions={"answer": 100},
            pairs=tuple(((), "great 4" if one else "4", "4") for one in dressed),
        )

    for blind in (True, False):
        watch, found = Watch.of(look(blind), 100, (), 20, 0.05), list[str]()
        for _ in range(12):
            watch, new = watch.update(look(blind))
            found += [alarm.detector for alarm in new]
        assert (f"{MARKED}great" in found) == blind


def test_without_gold_actions_alone_are_watched() -> None:
    quiet = probes(1, 64, 0.4)
    blind = Probe(step=0, proxy=quiet.proxy, gold=np.full(64, np.nan), actions=quiet.actions)
    watch = Watch.of(blind, 64, ("question",), 10, 0.05)
    assert [one.name for one in watch.detectors] == ["question"]
    assert Probe.of(blind.row() | {"gold": [None] * 64}).gold.shape == (64,)
