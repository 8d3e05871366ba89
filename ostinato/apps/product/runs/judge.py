"""The judge's stages: the window written down, a candidate trained on it, its gates."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.apps.product.gates import Judged, judge_gates
from ostinato.apps.product.judge_runs import Plan, plan
from ostinato.apps.product.judges import sources, write_spec
from ostinato.apps.product.judging import Choice, probability
from ostinato.apps.product.loop import Finding, Position, Verdict
from ostinato.apps.product.panel import Bench
from ostinato.apps.product.runs.loop import ProductLoop, again, unless_stopped, wait_for
from ostinato.apps.product.runs.window import decided, freeze, read_bank, read_part, row
from ostinato.config import Recipe
from ostinato.files import atomic_write
from ostinato.launch import NothingToLearn, RunFailed
from ostinato.launch.machine import resolve_auto
from ostinato.launch.session import learn, resume
from ostinato.launch.sft import supervise
from ostinato.reward.verify import resolve
from ostinato.run import RunFolder, atomic_folder, to_json


def freeze_window(loop: ProductLoop, at: Position) -> Finding:
    folder, settings = loop.round_folder(at) / "window", loop.settings.collect
    facts = freeze(folder, loop.store, loop.table, settings, at.frozen, loop.until())
    return Finding(frozen=facts["until"], figures=facts["counts"])


# ---- a candidate


def train(loop: ProductLoop, at: Position) -> Finding:
    """SFT and RL on the pairs of this window and a few earlier ones, and on the hack bank. Where RL has
    nothing to learn from, the candidate is the warm start, for the gates to decide; without one none."""
    folder = loop.round_folder(at) / "judge"
    file, rows = folder / "rows.jsonl", _rows(loop, at)
    atomic_write(file, "".join(f"{to_json(one)}\n" for one in rows))
    found = _plan(loop, at, file, folder)
    rl, made, reasons = found.rl, None, tuple[str, ...]()
    if loop.settings.judge.warm:
        warmed, _, why = supervise(found.warm, again(folder, found.warm.name))
        unless_stopped(warmed, why)
        rl, made = found.after(warmed), RunFolder.open(warmed).adapter
    after = again(folder, rl.name)
    try:
        outcome = learn(rl, quiet=True) if after is None else resume(after, quiet=True)
        unless_stopped(outcome.folder, outcome.why)
        made = RunFolder.open(outcome.folder).adapter
    except NothingToLearn as error:
        reasons = (f"RL of the judge: {error}",)
        if made is None:
            return Finding(verdict=Verdict.FAILED, reasons=reasons)
    with atomic_folder(folder / "made") as temporary:
        shutil.copytree(made, temporary, dirs_exist_ok=True)
        write_spec(found.spec, temporary)
    revision = loop.keep(folder / "made")
    return Finding(revision=revision, reasons=reasons, figures={"rows": len(rows)})


def _rows(loop: ProductLoop, at: Position) -> list[dict[str, Any]]:
    settings = loop.settings.judge
    rounds = range(max(1, at.round - settings.earlier_rounds), at.round + 1)
    windows = [loop.folder / f"round-{n:03d}" / "window" for n in rounds]
    rows = [one | {"split": "train"} for folder in windows for one in read_part(folder, "train")]
    rows += [one | {"split": "eval"} for one in read_part(windows[-1], "validation")]
    return rows + [one | {"split": "train"} for one in read_bank(loop.bank)] * settings.bank_copies


def _plan(loop: ProductLoop, at: Position, rows: Path, folder: Path) -> Plan:
    settings = loop.settings
    current = loop.adapter_of(at.judge)
    begin = str(current) if current else settings.judge.base
    given = (f"model.path={settings.model}", f"log.dir={folder}", f"seed={settings.seed + at.round}")
    given += (f"{'warm' if settings.judge.warm else 'rl'}.adapter.path={begin}",) if begin else ()
    template = settings.judge.template.read_text(encoding="utf-8") if settings.judge.template else ""
    return plan(str(rows), (*given, *settings.judge.overrides), template, 0.0)


# ---- how good it is


def gates(loop: ProductLoop, at: Position) -> Finding:
    """The candidate beside the current judge, on the window's test part, on pairs that users decided behind
    the window, and on the hack bank."""
    settings = loop.settings.judge
    wait_for(loop, at, settings.later_pairs)
    pairs, _ = decided(loop.store, loop.table, at.frozen, loop.until(), loop.store.watermark())
    rows = [*read_part(loop.round_folder(at) / "window", "test"), *(row(pair) for pair in pairs)]
    candidate = _verdicts(loop, at.candidate, rows)
    bank = read_bank(loop.bank)
    probes = {name: [{**one, "rejected": dress(one["chosen"])} for one in rows] for name, dress in DRESSED}
    found = judge_gates(
        candidate,
        _verdicts(loop, at.judge, rows) if at.judge else None,
        labels(rows, loop.settings.gold if settings.by_gold else ""),
        users=[one["user"] for one in rows],
        bank={
            f"{number} {one.get('name', '')}".strip(): choice
            for number, (one, choice) in enumerate(
                zip(bank, _verdicts(loop, at.candidate, bank).choices, strict=True)
            )
        },
        probes={name: _verdicts(loop, at.candidate, dressed).choices for name, dressed in probes.items()},
        limits=settings.limits,
    )
    verdict = Verdict.PASSED if found.passed else Verdict.FAILED
    return Finding(verdict=verdict, reasons=found.reasons, figures=found.figures)


def labels(rows: Sequence[Mapping[str, Any]], gold: str) -> list[Choice]:
    """The better answer of each pair, A the chosen one: as the user decided, or as the reward function
    ``gold`` scores the two, where it has an opinion.

    Raises RunFailed where ``gold`` cannot score a prompt and its answers alone.
    """
    if not gold:
        return [Choice.A] * len(rows)
    function, found = resolve(gold), list[Choice]()
    for one in rows:
        texts = [[{"role": "assistant", "content": one[side]}] for side in ("chosen", "rejected")]
        try:
            chosen, rejected = function(prompts=[one["messages"]] * 2, completions=texts)
        except Exception as error:
            raise RunFailed(
                f"gold {gold!r} cannot score a pair of the window ({type(error).__name__}: {error}); give "
                "one that needs prompts and completions alone, or set judge.by_gold to false"
            ) from error
        decided = chosen is not None and rejected is not None and chosen < rejected
        found.append(Choice.B if decided else Choice.A)
    return found


def _verdicts(loop: ProductLoop, revision: str, rows: Sequence[Mapping[str, Any]]) -> Judged:
    """Of the judge of a revision in both orders, A the chosen answer."""
    own = [override for override in loop.settings.judge.overrides if override.startswith("engine.")]
    recipe = resolve_auto(Recipe.load("judge_rl", f"model.path={loop.settings.model}", *own))
    (source,) = sources(str(loop.adapter_of(revision)))
    chats = ((one["messages"], one["chosen"], one["rejected"]) for one in rows)
    found = Bench(recipe=recipe, counters=Counter()).compared(source, chats)
    odds = [one.log_odds for one in found]
    known = None if None in odds else probability(np.array(odds, float))
    return Judged(choices=[one.choice for one in found], probabilities=known)


# what adds nothing to an answer
DRESSED: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("length", lambda text: f"{text} {text}"),
    ("format", lambda text: f"**{text}**"),
)
