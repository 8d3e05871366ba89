"""The policy's stages: RL with the judge under the eyes of detectors, its gates, and the canary.

A run is trained in pieces of a few steps, each of which ends with a checkpoint and a look (``watch``). Looks
are kept in the run's folder, so what the detectors find does not depend on when a process was killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ostinato.apps.product.gates import compare_pairs, policy_gates
from ostinato.apps.product.judging import Choice
from ostinato.apps.product.loop import Finding, Position, Stage, Verdict
from ostinato.apps.product.rewards import rewards
from ostinato.apps.product.runs import judge
from ostinato.apps.product.runs.loop import ProductLoop, Work, again, unless_stopped
from ostinato.apps.product.runs.watch import MARKED, Probe, Watch, answers, prefer, probe
from ostinato.apps.product.runs.window import add_exemplars
from ostinato.config import Recipe
from ostinato.launch import NothingToLearn
from ostinato.launch.session import learn, resume
from ostinato.run import Jsonl, RunFolder, atomic_folder

KL = ("opd/reverse_kl", "kl")  # metrics of the distance to the current policy, nats a token
PROBES = "probes.jsonl"  # of a run: its looks


def train(loop: ProductLoop, at: Position) -> Finding:
    """RL pinned to the current judge. An alarm ends it, and its exemplars go into the hack bank."""
    settings, folder = loop.settings.policy, loop.round_folder(at) / "policy"
    recipe = policy_recipe(loop, at, folder)
    path = again(folder, recipe.name)
    while True:
        step = _last_look(path)
        if path is not None and step:
            run = RunFolder.open(path)
            reasons, figures = alarms(loop, run), {"steps": step, "kl": _kl(run, step) or 0.0}
            if reasons:
                return Finding(verdict=Verdict.ALARM, reasons=tuple(reasons), figures=figures)
            if step >= settings.steps:
                return Finding(revision=loop.keep(run.adapter), figures=figures)
        step = min(settings.steps, step + settings.look_every)
        try:
            if path is None:
                trainer = recipe.trainer.model_copy(update={"steps": step})
                outcome = learn(recipe.model_copy(update={"trainer": trainer}), quiet=True)
            else:
                outcome = resume(path, f"trainer.steps={step}", quiet=True)
        except NothingToLearn as error:
            return Finding(verdict=Verdict.FAILED, reasons=(str(error),))
        path = outcome.folder
        unless_stopped(path, outcome.why)
        look(loop, at, recipe, RunFolder.open(path), step)


def _last_look(run: Path | None) -> int:
    """The step of the last look."""
    return max((row["step"] for row in Jsonl(run / PROBES).rows()), default=0) if run else 0


def policy_recipe(loop: ProductLoop, at: Position, folder: Path) -> Recipe:
    """Of the round: the judge as its reward; it begins with the current policy, and stays near it by
    algo.teacher_coef, where the recipe has one."""
    settings = loop.settings
    current = adapter_path(loop, at.policy)
    given = [f"model.path={settings.model}", f"log.dir={folder}", f"seed={settings.seed + at.round}"]
    given += [f'reward.functions=["judge:{loop.adapter_of(at.judge)}"]']
    if current:
        given += [f"adapter.path={current}", f"teacher.adapter={current}"]
    else:
        given.append(f"teacher.model={settings.model}")
    return Recipe.load(settings.policy.recipe, *given, *settings.policy.overrides)


def adapter_path(loop: ProductLoop, revision: str) -> str:
    """The adapter of a policy; "" for the model itself."""
    folder = loop.adapter_of(revision)
    return str(folder) if folder else loop.settings.policy.base


# ---- under the eyes of detectors


def look(loop: ProductLoop, at: Position, recipe: Recipe, run: RunFolder, step: int) -> None:
    """Measure at ``step`` beside the policy of some looks before; the first look is of the current policy
    beside itself."""
    log, kept, current = Jsonl(run.path / PROBES), _keep_look(run, step), adapter_path(loop, at.policy)
    if not any(log.rows()):
        log.append(_probe(loop, at, recipe, current, current, 0).row())
    steps = [row["step"] for row in log.rows()]
    before = steps[max(0, len(steps) - loop.settings.policy.behind)]
    beside = str(_keep_look(run, before)) if before else current
    log.append(_probe(loop, at, recipe, str(kept), beside, step).row())


def alarms(loop: ProductLoop, run: RunFolder) -> list[str]:
    """The sentences of alarms so far, from the looks that are written down alone: who is killed behind one
    finds the same. Their exemplars are in the hack bank then."""
    settings = loop.settings.policy
    quiet, *seen = (Probe.of(row) for row in Jsonl(run.path / PROBES).rows())
    looks = -(-settings.steps // settings.look_every)
    watch = Watch.of(quiet, sum(quiet.actions.values()), settings.counted, looks, settings.false_alarms)
    found, marks = list[str](), list[str]()
    for one in seen:
        watch, new = watch.update(one)
        found += [f"step {one.step}: {alarm.sentence}" for alarm in new]
        marks += [alarm.detector.removeprefix(MARKED) for alarm in new if alarm.detector.startswith(MARKED)]
    if found:
        rows = (row for mark in marks or [""] for one in (quiet, *seen) for row in one.exemplars(mark))
        found.append(f"{add_exemplars(loop.bank, rows)} exemplars of it went into the hack bank")
    return found


def _keep_look(run: RunFolder, step: int) -> Path:
    """A copy of the run's adapter of ``step``, the last one or that of a look before."""
    folder = run.path / "looks" / f"{step:06d}"
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            shutil.copytree(run.adapter, temporary, dirs_exist_ok=True)
    return folder


def _probe(loop: ProductLoop, at: Position, recipe: Recipe, adapter: str, beside: str, step: int) -> Probe:
    settings = loop.settings
    n = settings.policy.probe * (4 if step == 0 else 1)
    both = (adapter, 2 * step + 1), (beside, 2 * step + 2)
    ours, theirs = answers(recipe, both, settings.gold, n, prompts=step + 1)
    proxy = prefer(recipe, str(loop.adapter_of(at.judge)), ours, theirs)
    return probe(step, ours, theirs, proxy)


def _kl(run: RunFolder, step: int) -> float | None:
    """Of the last step, to the current policy."""
    last = next((row for row in run.metrics.rows() if row["step"] == step), {})
    return next((last[name] for name in KL if name in last), None)


# ---- what it is let through by


def gates(loop: ProductLoop, at: Position) -> Finding:
    """The candidate beside the current policy: held-out ability, gold, the distance between them."""
    settings, run = loop.settings, again(loop.round_folder(at) / "policy", "")
    assert run is not None
    recipe = policy_recipe(loop, at, run.parent)
    both = (str(loop.adapter_of(at.candidate)), 0), (adapter_path(loop, at.policy), 0)

    def scored(function: str) -> tuple[np.ndarray, np.ndarray]:
        found = answers(recipe, both, function, settings.policy.gate_prompts, prompts=0)
        ours, theirs = (one.gold for one in found)
        known = ~(np.isnan(ours) | np.isnan(theirs))
        return ours[known], theirs[known]

    golds = zip(*scored(settings.gold), strict=True)
    panel = [Choice.A if a > b else Choice.B if a < b else Choice.TIE for a, b in golds]
    found = policy_gates(
        {name: compare_pairs(*scored(name)) for name in settings.policy.ability},
        panel,
        _kl(RunFolder.open(run), settings.policy.steps) or 0.0,
        limits=settings.policy.limits,
    )
    verdict = Verdict.PASSED if found.passed else Verdict.FAILED
    return Finding(verdict=verdict, reasons=found.reasons, figures=found.figures)


def canary(loop: ProductLoop, at: Position) -> Finding:
    """Rewards of the answers that users got from the candidate, beside those of control in the same time."""
    settings = loop.settings.canary
    while True:
        arms = _arms(loop, at)
        if len(arms["canary"]) >= settings.answers and len(arms["control"]) >= 2:
            break
        loop.wait()
    means = {arm: float(np.mean(values)) for arm, values in arms.items()}
    spread = sum(float(np.var(values, ddof=1)) / len(values) for values in arms.values()) ** 0.5
    gap = means["canary"] - means["control"]
    figures = {"canary": means["canary"], "control": means["control"], "gap": gap, "stderr": spread}
    worse = gap + 1.645 * spread < -settings.worse
    reason = (
        f"mean reward by users {means['canary']:.3f} of the candidate, {means['control']:.3f} of the "
        f"current policy (difference {gap:+.3f}, standard error {spread:.3f})"
    )
    return Finding(verdict=Verdict.FAILED if worse else Verdict.PASSED, reasons=(reason,), figures=figures)


def _arms(loop: ProductLoop, at: Position) -> dict[str, list[float]]:
    """Decided rewards since the candidate's first answer: its own, and those of the current policy."""
    now, found = loop.now(), {"canary": list[float](), "control": list[float]()}
    joined = list(loop.store.joined(since=at.frozen, until=now, horizon_s=loop.table.horizon_s))
    since = min((one.exchange.ts for one in joined if one.exchange.revision == at.candidate), default=now)
    joined = [one for one in joined if one.exchange.ts >= since]
    account = rewards(
        [one.exchange for one in joined], (event for one in joined for event in one.events), now, loop.table
    )
    for one in joined:
        value = account.outcomes[one.exchange.response_id].value
        arm = {at.candidate: "canary", at.policy: "control"}.get(one.exchange.revision)
        if value is not None and arm is not None:
            found[arm].append(value)
    return found


STAGES: Mapping[Stage, Work] = {  # what each does; ``collect`` is the loop's own
    Stage.FREEZE: judge.freeze_window,
    Stage.JUDGE: judge.train,
    Stage.JUDGE_GATES: judge.gates,
    Stage.POLICY: train,
    Stage.POLICY_GATES: gates,
    Stage.CANARY: canary,
}
