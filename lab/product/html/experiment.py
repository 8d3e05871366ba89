"""The HTML task, whole: a base by a crowd, RL with a browser as the reward, DPO on what users have edited.

    python -m lab.product.html.experiment FOLDER --seeds 3 --json docs/data/html-components.json

    FOLDER/base.jsonl, base/     rows of the crowd, and the model that base.toml makes of them
    FOLDER/task/                 train.jsonl and eval.jsonl
    FOLDER/rl-SEED/              runs; the pictures of the base and of the trained policy are in their reports
    FOLDER/feedback.sqlite, edits.jsonl, edits/      what users did, the pairs of edits, the run on them

A run that is there is not made again: the command goes on where it was stopped. Figures: share of held-out
components that pass every check, one answer a prompt at temperature 1, with Wilson's 95 % interval.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.harness import say
from lab.paired import wilson
from lab.product.html.browser import Browser
from lab.product.html.checks import Verdict, prepare, verdicts
from lab.product.html.components import Kind, Spec, crowd_rows, draw, rows
from lab.product.html.users import EPOCH, Users, react
from lab.product.measure import completions
from lab.settings import machine
from lab.whole_runs import trained
from ostinato.files import atomic_write
from ostinato.observe.report import write_report
from ostinato.product.events import Action, Exchange
from ostinato.product.pairs import Extracted, Source, extract
from ostinato.product.store import open_store
from ostinato.render import Renderer
from ostinato.run import RunFolder

HERE = Path(__file__).parent
CROWD_ROWS, TASK_ROWS, HELD_OUT = 8_000, 640, 320
SHOWN = 768  # prompts of users; two answers to each, of which the second is shown on demand
MAX_TOKENS = 256
SHEET = (3, 284, 132)  # columns, width and height of one component
Row = dict[str, Any]


# ---- measuring


def passed(browser: Browser, model: Path, specs: Sequence[Spec], temperature: float) -> tuple[Row, list[str]]:
    """(share that passes with its interval, what fails by check, by kind, and what the browser failed at; the
    answers)."""
    chats = [({"role": "user", "content": spec.prompt},) for spec in specs]
    texts = completions(str(model), chats, temperature=temperature, max_tokens=MAX_TOKENS)
    found = verdicts(browser, list(zip(texts, specs, strict=True)))
    return tally(found, specs), texts


def tally(found: Sequence[Verdict | None], specs: Sequence[Spec]) -> Row:
    judged = [(one, spec) for one, spec in zip(found, specs, strict=True) if one is not None]
    good = sum(one.passed for one, _ in judged)
    faults = Counter(name for one, _ in judged for name in one.faults)
    kinds = {str(kind): [one.passed for one, spec in judged if spec.kind is kind] for kind in Kind}
    return {
        "passed": good,
        "n": len(judged),
        "share": good / max(len(judged), 1),
        "interval": wilson(good, len(judged)),
        "missing": len(found) - len(judged),
        "failed_checks": dict(faults.most_common()),
        "by_kind": {kind: [sum(some), len(some)] for kind, some in kinds.items()},
    }


def chosen(specs: Sequence[Spec], count: int = 12) -> list[int]:
    """Places of the first of every kind, then of others, in order: what a sheet shows."""
    firsts = {spec.kind: at for at, spec in reversed(list(enumerate(specs)))}
    rest = [at for at in range(len(specs)) if at not in firsts.values()]
    return sorted([*firsts.values(), *rest[: count - len(firsts)]])


def sheet(browser: Browser, specs: Sequence[Spec], texts: Sequence[str]) -> bytes:
    """PNG of the chosen components as the browser shows them, with what was asked for above each."""
    places = chosen(specs)
    shown = [(texts[at], specs[at]) for at in places]
    items = [
        {"html": text, "title": spec.prompt, "good": bool(one and one.passed)}
        for (text, spec), one in zip(shown, verdicts(browser, shown), strict=True)
    ]
    columns, width, height = SHEET
    picture = Browser()  # of its own: a page that has shown a sheet is no longer an empty one
    try:
        prepare(picture)
        high = -(-len(items) // columns) * (height + 2)
        picture.screenshot(columns * (width + 2), high)
        picture.evaluate(f"components.sheet({json.dumps(items)}, {columns}, {width}, {height})")
        return picture.screenshot(columns * (width + 2), high)
    finally:
        picture.close()


# ---- the runs


def made(verb: str, recipe: str, folder: Path, *overrides: str) -> RunFolder:
    """The run under ``folder``, begun and ended once."""
    ended = sorted(folder.glob("*/adapter"))
    if ended:
        return RunFolder.open(ended[-1].parent)
    folder.mkdir(parents=True, exist_ok=True)
    keys = ["engine.threads=1", *overrides]
    return trained(str(HERE / recipe), keys, folder, f"{recipe} in {folder.name}", verb=verb)


def written(path: Path, found: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in found))
    return path


def base_of(folder: Path) -> Path:
    """The model that the crowd's rows make of seed-moe."""
    source = written(folder / "base.jsonl", crowd_rows(CROWD_ROWS))
    return made("sft", "base.toml", folder / "base", f"task.source={source}").adapter


def by_rl(folder: Path, base: Path, seed: int, *overrides: str) -> RunFolder:
    written(folder / "task" / "train.jsonl", rows("train", TASK_ROWS))
    written(folder / "task" / "eval.jsonl", rows("eval", HELD_OUT))
    keys = (f"model.path={base}", f"task.source={folder / 'task'}", f"seed={seed}", *overrides)
    return made("train", "rl.toml", folder / f"rl-{seed}", *keys)


# ---- what users do


def feedback(folder: Path, browser: Browser, base: Path, users: Users) -> Extracted:
    """Users are shown what the base writes, what they do goes into a store, and pairs come out of that."""
    specs = draw("train", SHOWN, seed=1, again=True)
    chats = [({"role": "user", "content": spec.prompt},) for spec in specs for _ in range(2)]
    texts = completions(str(base), chats, temperature=1.0, max_tokens=MAX_TOKENS, seed=1)
    twice = [spec for spec in specs for _ in range(2)]
    found = verdicts(browser, list(zip(texts, twice, strict=True)))
    exchanges = [_exchange(at, spec, text) for at, (spec, text) in enumerate(zip(twice, texts, strict=True))]
    where = folder / "feedback.sqlite"
    where.unlink(missing_ok=True)
    with open_store(str(where)) as store:
        for at in range(0, len(exchanges), 2):
            store.write(*_session(users, exchanges[at : at + 2], twice[at], found[at : at + 2]))
        stored = list(store.joined())
        return extract([one.exchange for one in stored], store.events(), EPOCH + 10 * SHOWN)


def _session(
    users: Users, answers: Sequence[Exchange], spec: Spec, found: Sequence[Verdict | None]
) -> tuple[list[Any], list[Exchange]]:
    """The first answer is shown, the second where the user asks for another one. (events, what was shown)."""
    events: list[Any] = []
    for place, (answer, verdict) in enumerate(zip(answers, found, strict=True)):
        if verdict is None:
            return events, list(answers[:place])
        before = answers[place - 1].response_id if place else ""
        events += react(users, answer, spec, verdict.faults, replaces=before)
        if events[-1].kind != "regenerate":
            return events, list(answers[: place + 1])
    return events, list(answers)


def _exchange(at: int, spec: Spec, text: str) -> Exchange:
    nothing = np.zeros(0, np.int32)  # pairs are made of texts
    return Exchange(
        response_id=f"r{at:05d}",
        ts=EPOCH + 10.0 * at / 2,
        model="html",
        revision="base",
        messages=({"role": "user", "content": spec.prompt},),
        output=text,
        action=Action.ANSWER if text.strip() else Action.EMPTY,
        prompt_tokens=nothing,
        tokens=nothing,
        logprobs=np.zeros(0, np.float32),
        user=f"u{at // 2 % 32:02d}",
    )


def edit_rows(found: Extracted) -> list[Row]:
    """The edited over the generated, in TRL's form."""
    return [
        {
            "prompt": list(pair.messages),
            "chosen": [{"role": "assistant", "content": pair.chosen}],
            "rejected": [{"role": "assistant", "content": pair.rejected}],
        }
        for pair in found.pairs
        if pair.source is Source.EDIT
    ]


# ---- all of it


def run(folder: Path, seeds: Sequence[int], overrides: Sequence[str]) -> Row:
    folder = folder.resolve()
    browser = Browser()
    specs = draw("eval", HELD_OUT)
    try:
        base = base_of(folder)
        before, texts = passed(browser, base, specs, 1.0)
        greedy, _ = passed(browser, base, specs, 0.0)
        say(_line("base", before))
        first = sheet(browser, specs, texts)
        found: Row = {
            "machine": machine(),
            "settings": settings(seeds),
            "base": before,
            "base_greedy": greedy,
        }
        found["rl"] = [_seed(folder, browser, base, seed, specs, first, overrides) for seed in seeds]
        return found | {"edits": _edits(folder, browser, base, specs)}
    finally:
        browser.close()


def _seed(
    folder: Path,
    browser: Browser,
    base: Path,
    seed: int,
    specs: Sequence[Spec],
    before: bytes,
    overrides: Sequence[str],
) -> Row:
    """RL of one seed, measured; both sheets are in its report."""
    trained_run = by_rl(folder, base, seed, *overrides)
    after, texts = passed(browser, trained_run.path, specs, 1.0)
    say(_line(f"RL, seed {seed}", after))
    pictures = trained_run.path / "pictures"
    pictures.mkdir(exist_ok=True)
    last = sheet(browser, specs, texts)
    for name, png in (("1 before", before), ("2 after", last)):
        atomic_write(pictures / f"{name}.png", png)
    write_report(trained_run, renderer=Renderer(base))
    curve = [{key: row[key] for key in ("step", "pass@1")} for row in trained_run.eval.rows()]
    return {"seed": seed, **after, "curve": curve, "rewards": _rewards(trained_run)}


def _rewards(trained_run: RunFolder) -> list[float]:
    return [round(float(row["reward"]), 4) for row in trained_run.metrics.rows()]


def _edits(folder: Path, browser: Browser, base: Path, specs: Sequence[Spec]) -> Row:
    found = feedback(folder, browser, base, Users())
    source = written(folder / "edits.jsonl", edit_rows(found))
    learned = made("sft", "edits.toml", folder / "edits", f"model.path={base}", f"task.source={source}")
    after, _ = passed(browser, learned.path, specs, 1.0)
    say(_line("DPO on edits", after))
    return {"shown": SHOWN, "pairs": dict(found.counts), **after}


def settings(seeds: Sequence[int]) -> Row:
    sizes = {"crowd_rows": CROWD_ROWS, "task_rows": TASK_ROWS, "held_out": HELD_OUT, "shown": SHOWN}
    recipes = {
        name: (HERE / name).read_text(encoding="utf-8") for name in ("base.toml", "rl.toml", "edits.toml")
    }
    return {"seeds": list(seeds), **sizes, "recipes": recipes}


def _line(name: str, row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    return f"{name}: {row['passed']} of {row['n']} pass, {row['share']:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="The HTML task, from the crowd to the report.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="of rl.toml")
    args = parser.parse_intermixed_args()
    found = run(args.folder, range(args.seeds), args.overrides)
    text = json.dumps(found, indent=1) + "\n"
    if args.json:
        atomic_write(args.json, text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
