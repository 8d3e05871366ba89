"""The judge's stages: they freeze the window, train a candidate on it, and assess the candidate."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.apps.product.gates import Judged, judge_gates
from ostinato.apps.product.judge_runs import Plan, plan_runs
from ostinato.apps.product.judges import open_sources, write_spec
from ostinato.apps.product.judging import Choice, compute_probability
from ostinato.apps.product.loop import Finding, Position, Verdict
from ostinato.apps.product.panel import Bench
from ostinato.apps.product.runs.loop import ProductLoop, find_run, require_end, wait_for
from ostinato.apps.product.runs.window import build_row, collect_pairs, read_bank, read_part, write_window
from ostinato.config import Recipe
from ostinato.files import atomic_write
from ostinato.launch import NothingToLearn, RunFailed
from ostinato.launch.machine import resolve_auto
from ostinato.launch.session import learn, resume
from ostinato.launch.sft import train_supervised
from ostinato.reward.verify import resolve_function
from ostinato.run import RunFolder, atomic_folder, to_json


def freeze_window(loop: ProductLoop, at: Position) -> Finding:
    """Write the window of the round, or read it if a killed process has written it."""
    folder, settings = loop.round_folder(at) / "window", loop.settings.collect
    facts = write_window(folder, loop.store, loop.table, settings, at.frozen, loop.until())
    return Finding(frozen=facts["until"], figures=facts["counts"])


# ---- a candidate


def train_judge(loop: ProductLoop, at: Position) -> Finding:
    """Train a candidate by SFT and RL on the pairs of this window and a few earlier ones, and on the hack
    bank, and keep its adapter as a revision. Runs of a killed process go on. If RL has nothing to learn from,
    the candidate is the warm start; without a warm start the stage fails. Raises RunFailed for a run that was
    stopped."""
    folder = loop.round_folder(at) / "judge"
    file, rows = folder / "rows.jsonl", _read_rows(loop, at)
    atomic_write(file, "".join(f"{to_json(row)}\n" for row in rows))
    judge_plan = _plan_runs(loop, at, file, folder)
    rl, adapter, reasons = judge_plan.rl, None, tuple[str, ...]()
    if loop.settings.judge.warm:
        warm_run, _, reason = train_supervised(judge_plan.warm, find_run(folder, judge_plan.warm.name))
        require_end(warm_run, reason)
        rl, adapter = judge_plan.after(warm_run), RunFolder.open(warm_run).adapter
    earlier_run = find_run(folder, rl.name)
    try:
        outcome = learn(rl, quiet=True) if earlier_run is None else resume(earlier_run, quiet=True)
        require_end(outcome.folder, outcome.why)
        adapter = RunFolder.open(outcome.folder).adapter
    except NothingToLearn as error:
        reasons = (f"RL of the judge: {error}",)
        if adapter is None:
            return Finding(verdict=Verdict.FAILED, reasons=reasons)
    with atomic_folder(folder / "made") as temporary:
        shutil.copytree(adapter, temporary, dirs_exist_ok=True)
        write_spec(judge_plan.spec, temporary)
    revision = loop.keep(folder / "made")
    return Finding(revision=revision, reasons=reasons, figures={"rows": len(rows)})


def _read_rows(loop: ProductLoop, at: Position) -> list[dict[str, Any]]:
    settings = loop.settings.judge
    rounds = range(max(1, at.round - settings.earlier_rounds), at.round + 1)
    windows = [loop.folder / f"round-{n:03d}" / "window" for n in rounds]
    rows = [row | {"split": "train"} for folder in windows for row in read_part(folder, "train")]
    rows += [row | {"split": "eval"} for row in read_part(windows[-1], "validation")]
    return rows + [row | {"split": "train"} for row in read_bank(loop.bank)] * settings.bank_copies


def _plan_runs(loop: ProductLoop, at: Position, rows: Path, folder: Path) -> Plan:
    """Plan the runs of the round's candidate and write their data. It begins with the current judge, or with
    the base adapter of the settings."""
    settings = loop.settings
    current_adapter = loop.adapter_of(at.judge)
    start = str(current_adapter) if current_adapter else settings.judge.base
    overrides = (f"model.path={settings.model}", f"log.dir={folder}", f"seed={settings.seed + at.round}")
    overrides += (f"{'warm' if settings.judge.warm else 'rl'}.adapter.path={start}",) if start else ()
    template = settings.judge.template.read_text(encoding="utf-8") if settings.judge.template else ""
    return plan_runs(str(rows), (*overrides, *settings.judge.overrides), template, 0.0)


# ---- gates


def assess_candidate(loop: ProductLoop, at: Position) -> Finding:
    """Wait for enough pairs that users decide after the window. Then assess the candidate beside the current
    judge, on these and the window's test part, and alone on the hack bank and on probes."""
    settings = loop.settings.judge
    wait_for(loop, at, settings.later_pairs)
    pairs, _ = collect_pairs(loop.store, loop.table, at.frozen, loop.until(), loop.store.watermark())
    rows = [*read_part(loop.round_folder(at) / "window", "test"), *(build_row(pair) for pair in pairs)]
    candidate = _compare_rows(loop, at.candidate, rows)
    bank = read_bank(loop.bank)
    probes = {
        name: [{**pair_row, "rejected": dress(pair_row["chosen"])} for pair_row in rows]
        for name, dress in PADDINGS
    }
    assessment = judge_gates(
        candidate,
        _compare_rows(loop, at.judge, rows) if at.judge else None,
        choose_labels(rows, loop.settings.gold if settings.by_gold else ""),
        users=[pair_row["user"] for pair_row in rows],
        bank={
            f"{number} {pair_row.get('name', '')}".strip(): choice
            for number, (pair_row, choice) in enumerate(
                zip(bank, _compare_rows(loop, at.candidate, bank).choices, strict=True)
            )
        },
        probes={
            name: _compare_rows(loop, at.candidate, probe_rows).choices for name, probe_rows in probes.items()
        },
        limits=settings.limits,
    )
    verdict = Verdict.PASSED if assessment.passed else Verdict.FAILED
    return Finding(verdict=verdict, reasons=assessment.reasons, figures=assessment.figures)


def choose_labels(rows: Sequence[Mapping[str, Any]], gold: str) -> list[Choice]:
    """Return the better answer of each pair, A for the chosen one. Without ``gold`` that is A. With ``gold``,
    a reward function, it is B if the rejected answer has the higher score.

    Raises RunFailed if ``gold`` cannot score a prompt and its answers alone.
    """
    if not gold:
        return [Choice.A] * len(rows)
    function, choices = resolve_function(gold), list[Choice]()
    for pair_row in rows:
        texts = [[{"role": "assistant", "content": pair_row[side]}] for side in ("chosen", "rejected")]
        try:
            chosen_score, rejected_score = function(prompts=[pair_row["messages"]] * 2, completions=texts)
        except Exception as error:
            raise RunFailed(
                f"gold {gold!r} cannot score a pair of the window ({type(error).__name__}: {error}); give "
                "one that needs prompts and completions alone, or set judge.by_gold to false"
            ) from error
        prefers_rejected = (
            chosen_score is not None and rejected_score is not None and chosen_score < rejected_score
        )
        choices.append(Choice.B if prefers_rejected else Choice.A)
    return choices


def _compare_rows(loop: ProductLoop, revision: str, rows: Sequence[Mapping[str, Any]]) -> Judged:
    """Compare each pair in both orders by the judge of a revision, A being the chosen answer."""
    engine_overrides = [
        override for override in loop.settings.judge.overrides if override.startswith("engine.")
    ]
    recipe = resolve_auto(Recipe.load("judge_rl", f"model.path={loop.settings.model}", *engine_overrides))
    (source,) = open_sources(str(loop.adapter_of(revision)))
    chats = ((row["messages"], row["chosen"], row["rejected"]) for row in rows)
    comparisons = Bench(recipe=recipe, counters=Counter()).compare(source, chats)
    odds = [comparison.log_odds for comparison in comparisons]
    probabilities = None if None in odds else compute_probability(np.array(odds, float))
    return Judged(choices=[comparison.choice for comparison in comparisons], probabilities=probabilities)


# changes that add nothing to an answer
PADDINGS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("length", lambda text: f"{text} {text}"),
    ("format", lambda text: f"**{text}**"),
)
