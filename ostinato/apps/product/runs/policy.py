"""The policy's stages: RL with the judge, which detectors watch; the gates of the candidate; the canary.

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
from ostinato.apps.product.runs.loop import ProductLoop, Work, find_run, require_end
from ostinato.apps.product.runs.watch import (
    MARKED,
    Probe,
    Watch,
    build_probe,
    compare_answers,
    sample_answers,
)
from ostinato.apps.product.runs.window import add_exemplars
from ostinato.config import Recipe
from ostinato.launch import NothingToLearn
from ostinato.launch.session import learn, resume
from ostinato.run import Jsonl, RunFolder, atomic_folder

KL = ("opd/reverse_kl", "kl")  # metrics of the distance to the current policy, nats a token
PROBES = "probes.jsonl"  # of a run: its looks


def train_policy(loop: ProductLoop, at: Position) -> Finding:
    """Train a candidate by RL with the current judge, at its revision, with a look after every few steps.
    Keep its adapter as a revision. A run of a killed process goes on. An alarm ends the run, and its
    exemplars go into the hack bank; a run that cannot learn fails. Raises RunFailed for a run that was
    stopped."""
    settings, folder = loop.settings.policy, loop.round_folder(at) / "policy"
    recipe = policy_recipe(loop, at, folder)
    path = find_run(folder, recipe.name)
    while True:
        step = _find_last_look(path)
        if path is not None and step:
            run = RunFolder.open(path)
            reasons, figures = find_alarms(loop, run), {"steps": step, "kl": _read_kl(run, step) or 0.0}
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
        require_end(path, outcome.why)
        record_look(loop, at, recipe, RunFolder.open(path), step)


def _find_last_look(run: Path | None) -> int:
    return max((row["step"] for row in Jsonl(run / PROBES).rows()), default=0) if run else 0


def policy_recipe(loop: ProductLoop, at: Position, folder: Path) -> Recipe:
    """Return the recipe of the round, with the judge as its reward. It begins with the current policy, which
    is also its teacher."""
    settings = loop.settings
    current_adapter = find_adapter(loop, at.policy)
    overrides = [f"model.path={settings.model}", f"log.dir={folder}", f"seed={settings.seed + at.round}"]
    overrides += [f'reward.functions=["judge:{loop.adapter_of(at.judge)}"]']
    if current_adapter:
        overrides += [f"adapter.path={current_adapter}", f"teacher.adapter={current_adapter}"]
    else:
        overrides.append(f"teacher.model={settings.model}")
    return Recipe.load(settings.policy.recipe, *overrides, *settings.policy.overrides)


def find_adapter(loop: ProductLoop, revision: str) -> str:
    """Return the path of a policy's adapter; "" for the model itself."""
    folder = loop.adapter_of(revision)
    return str(folder) if folder else loop.settings.policy.base


# ---- detectors


def record_look(loop: ProductLoop, at: Position, recipe: Recipe, run: RunFolder, step: int) -> None:
    """Copy the adapter, measure the policy at ``step`` beside the policy of some looks before, and
    append the look to the run's file. Before the first look, one compares the current policy with itself."""
    log, adapter, current = Jsonl(run.path / PROBES), _keep_look(run, step), find_adapter(loop, at.policy)
    if not any(log.rows()):
        log.append(_measure_probe(loop, at, recipe, current, current, 0).row())
    steps = [row["step"] for row in log.rows()]
    reference_step = steps[max(0, len(steps) - loop.settings.policy.behind)]
    reference = str(_keep_look(run, reference_step)) if reference_step else current
    log.append(_measure_probe(loop, at, recipe, str(adapter), reference, step).row())


def find_alarms(loop: ProductLoop, run: RunFolder) -> list[str]:
    """Return the sentences of all alarms so far, and add their exemplars to the hack bank. The alarms follow
    from the written looks alone, so a process that was killed after a look finds the same ones again."""
    settings = loop.settings.policy
    quiet_probe, *later_probes = (Probe.of(row) for row in Jsonl(run.path / PROBES).rows())
    looks = -(-settings.steps // settings.look_every)
    watch = Watch.of(
        quiet_probe, sum(quiet_probe.actions.values()), settings.counted, looks, settings.false_alarms
    )
    sentences, marks = list[str](), list[str]()
    for later_probe in later_probes:
        watch, new_alarms = watch.update(later_probe)
        sentences += [f"step {later_probe.step}: {alarm.sentence}" for alarm in new_alarms]
        marks += [
            alarm.detector.removeprefix(MARKED) for alarm in new_alarms if alarm.detector.startswith(MARKED)
        ]
    if sentences:
        rows = (
            row
            for mark in marks or [""]
            for measurement in (quiet_probe, *later_probes)
            for row in measurement.exemplars(mark)
        )
        sentences.append(f"{add_exemplars(loop.bank, rows)} exemplars of it went into the hack bank")
    return sentences


def _keep_look(run: RunFolder, step: int) -> Path:
    """Copy the run's adapter as that of ``step``, unless a copy of this step exists; return the copy."""
    folder = run.path / "looks" / f"{step:06d}"
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            shutil.copytree(run.adapter, temporary, dirs_exist_ok=True)
    return folder


def _measure_probe(
    loop: ProductLoop, at: Position, recipe: Recipe, adapter: str, reference: str, step: int
) -> Probe:
    """Sample fresh answers of two policies and compare them. Step 0, the look that calibrates the detectors,
    has four times the prompts."""
    settings = loop.settings
    prompt_count = settings.policy.probe * (4 if step == 0 else 1)
    policies = (adapter, 2 * step + 1), (reference, 2 * step + 2)
    policy_answers, reference_answers = sample_answers(
        recipe, policies, settings.gold, prompt_count, prompts=step + 1
    )
    proxy = compare_answers(recipe, str(loop.adapter_of(at.judge)), policy_answers, reference_answers)
    return build_probe(step, policy_answers, reference_answers, proxy)


def _read_kl(run: RunFolder, step: int) -> float | None:
    """Return the distance to the current policy at ``step`` in nats per token; None without such a metric."""
    metrics = next((row for row in run.metrics.rows() if row["step"] == step), {})
    return next((metrics[name] for name in KL if name in metrics), None)


# ---- gates and canary


def assess_candidate(loop: ProductLoop, at: Position) -> Finding:
    """Assess the candidate beside the current policy: held-out ability, gold, and the KL between them."""
    settings, run = loop.settings, find_run(loop.round_folder(at) / "policy", "")
    assert run is not None
    recipe = policy_recipe(loop, at, run.parent)
    policies = (str(loop.adapter_of(at.candidate)), 0), (find_adapter(loop, at.policy), 0)

    def score_by(function: str) -> tuple[np.ndarray, np.ndarray]:
        scores = sample_answers(recipe, policies, function, settings.policy.gate_prompts, prompts=0)
        ours, theirs = (policy_answers.gold for policy_answers in scores)
        is_usable = ~(np.isnan(ours) | np.isnan(theirs))
        return ours[is_usable], theirs[is_usable]

    golds = zip(*score_by(settings.gold), strict=True)
    panel = [Choice.A if a > b else Choice.B if a < b else Choice.TIE for a, b in golds]
    assessment = policy_gates(
        {name: compare_pairs(*score_by(name)) for name in settings.policy.ability},
        panel,
        _read_kl(RunFolder.open(run), settings.policy.steps) or 0.0,
        limits=settings.policy.limits,
    )
    verdict = Verdict.PASSED if assessment.passed else Verdict.FAILED
    return Finding(verdict=verdict, reasons=assessment.reasons, figures=assessment.figures)


def assess_canary(loop: ProductLoop, at: Position) -> Finding:
    """Wait for enough answers of the candidate to users, and compare their rewards with those of the current
    policy in the same time."""
    settings = loop.settings.canary
    while True:
        arms = _collect_rewards(loop, at)
        if len(arms["canary"]) >= settings.answers and len(arms["control"]) >= 2:
            break
        loop.wait()
    means = {arm: float(np.mean(values)) for arm, values in arms.items()}
    stderr = sum(float(np.var(values, ddof=1)) / len(values) for values in arms.values()) ** 0.5
    gap = means["canary"] - means["control"]
    figures = {"canary": means["canary"], "control": means["control"], "gap": gap, "stderr": stderr}
    is_worse = gap + 1.645 * stderr < -settings.worse
    reason = (
        f"mean reward by users {means['canary']:.3f} of the candidate, {means['control']:.3f} of the "
        f"current policy (difference {gap:+.3f}, standard error {stderr:.3f})"
    )
    return Finding(verdict=Verdict.FAILED if is_worse else Verdict.PASSED, reasons=(reason,), figures=figures)


def _collect_rewards(loop: ProductLoop, at: Position) -> dict[str, list[float]]:
    """Collect the decided rewards since the candidate's first answer, of the candidate ("canary") and of the
    current policy ("control")."""
    now, values = loop.now(), {"canary": list[float](), "control": list[float]()}
    answers = list(loop.store.joined(since=at.frozen, until=now, horizon_s=loop.table.horizon_s))
    since = min(
        (answer.exchange.ts for answer in answers if answer.exchange.revision == at.candidate), default=now
    )
    answers = [answer for answer in answers if answer.exchange.ts >= since]
    account = rewards(
        [answer.exchange for answer in answers],
        (event for answer in answers for event in answer.events),
        now,
        loop.table,
    )
    for answer in answers:
        value = account.outcomes[answer.exchange.response_id].value
        arm = {at.candidate: "canary", at.policy: "control"}.get(answer.exchange.revision)
        if value is not None and arm is not None:
            values[arm].append(value)
    return values


STAGES: Mapping[Stage, Work] = {  # ``collect_feedback`` is in runs/loop.py
    Stage.FREEZE: judge.freeze_window,
    Stage.JUDGE: judge.train_judge,
    Stage.JUDGE_GATES: judge.assess_candidate,
    Stage.POLICY: train_policy,
    Stage.POLICY_GATES: assess_candidate,
    Stage.CANARY: assess_canary,
}
