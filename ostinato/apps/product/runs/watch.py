"""Measure with detectors a policy that is trained: fresh answers of it and of an earlier policy.

    Probe   n new prompts, one answer each of the policy that learns and of the policy some looks before
            (first: the current policy); which is better by the judge, by how much by gold
    Watch   the detectors, after every probe so far: the same after a restart as without one

Beside the current policy, early gains would hide later losses. Successive looks at one policy would share
prompts and noise, which the bets do not allow: each look draws its own, of both policies.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.apps.product.actions import classify_answer
from ostinato.apps.product.detectors import (
    Cusum,
    Detector,
    choose_marks,
    exchange_rate,
    find_marked_side,
    measure_divergence,
    of_mark,
    standardise,
    watch_rate,
)
from ostinato.apps.product.judges import open_sources
from ostinato.apps.product.judging import Choice
from ostinato.apps.product.panel import Bench
from ostinato.config import Recipe, override
from ostinato.launch.machine import resolve_auto
from ostinato.observe.stats import Alarm, Bets
from ostinato.types import Prompt

if TYPE_CHECKING:
    from ostinato.launch.inputs import RunInputs

EXEMPLARS = 24  # of one alarm
MARKED = "gold lost by what the judge prefers: "  # and the mark
APART = 1009  # between the seeds of two draws
SCORES = {Choice.A: 1.0, Choice.B: -1.0, Choice.TIE: 0.0}
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers of a policy, one to each of n prompts; ``gold`` is NaN where there is none."""

    messages: tuple[Messages, ...]
    texts: tuple[str, ...]
    gold: np.ndarray  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The measurements of one look, beside the policy of some looks before. ``proxy``: 1 where the judge
    prefers the policy that learns, -1 the other, NaN without a verdict; ``gold``: by how much its answer is
    better by gold; ``pairs``: the chat and both answers."""

    step: int
    proxy: np.ndarray  # [n]
    gold: np.ndarray  # [n]
    actions: Mapping[str, int]
    pairs: tuple[tuple[Messages, str, str], ...] = ()  # [n]

    def row(self) -> dict[str, Any]:
        row = {"step": self.step, "actions": dict(self.actions), "proxy": self.proxy, "gold": self.gold}
        return row | {"pairs": [[*pair] for pair in self.pairs]}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Probe:
        proxy, gold = (np.array(row[name], float) for name in ("proxy", "gold"))  # JSON null becomes NaN
        return cls(
            step=row["step"],
            proxy=proxy,
            gold=gold,
            actions=row["actions"],
            pairs=tuple((chat, ours, theirs) for chat, ours, theirs in row["pairs"]),
        )

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(ours, theirs) for _, ours, theirs in self.pairs]

    def exemplars(self, mark: str = "") -> list[dict[str, Any]]:
        """Return the ``EXEMPLARS`` pairs about which judge and gold disagree most, the clearest first. With
        ``mark``, only pairs of which the judge prefers the answer with the mark count."""
        disagreement = np.where(np.isnan(self.proxy) | np.isnan(self.gold), 0.0, -self.proxy * self.gold)
        rows = []
        for index in sorted(np.flatnonzero(disagreement > 0), key=lambda index: -disagreement[index]):
            chat, *texts = self.pairs[index]
            rejected, chosen = texts if self.proxy[index] > 0 else texts[::-1]
            if not mark or find_marked_side((rejected, chosen), mark) > 0:
                row = {
                    "messages": [dict(message) for message in chat],
                    "chosen": chosen,
                    "rejected": rejected,
                }
                rows.append(row | ({"name": mark} if mark else {}))
        return rows[:EXEMPLARS]


def sample_answers(
    recipe: Recipe, adapters: Sequence[tuple[str, int]], gold: str, n: int, *, prompts: int
) -> list[Answers]:
    """Sample an answer of each policy in ``adapters`` to each of the n evaluation prompts of draw
    ``prompts``. ``adapters`` are (adapter, number of its draw of noise). ``gold`` is a reward function; ""
    for none."""
    from ostinato.launch.inputs import prepare_inputs

    overrides = [f"task.seed={recipe.task.seed + APART * prompts}", "eval.k=1", "eval.start_factor=1"]
    overrides += [f'reward.functions=["{gold or "none"}"]', "reward.weights=[]", f"eval.n={n}"]
    recipes = [
        resolve_auto(Recipe.parse(override(recipe.model_dump(mode="json"), [*overrides, *policy_overrides])))
        for policy_overrides in (
            [f"adapter.path={adapter}", f"seed={recipe.seed + APART * noise}"] for adapter, noise in adapters
        )
    ]
    with prepare_inputs(recipes[0], training=False) as inputs:
        return [
            _sample_answers(replace(inputs, recipe=policy_recipe), bool(gold)) for policy_recipe in recipes
        ]


def _sample_answers(inputs: RunInputs, is_scored: bool) -> Answers:
    """Sample the first answer to each evaluation prompt, with its gold if ``is_scored``."""
    from ostinato.launch.engine import new_engine
    from ostinato.launch.inputs import new_stage
    from ostinato.launch.loop import new_evaluations
    from ostinato.launch.trainer import new_adapters
    from ostinato.pipeline.evaluate import evaluate_groups

    recipe = inputs.recipe
    adapters = new_adapters(recipe, inputs.decoder) if recipe.adapter.path else None
    engine = new_engine(recipe, inputs.decoder, inputs.renderer)
    engine.publish(adapters, 0)
    stage = new_stage(inputs, engine, inputs.grader)
    _, groups = asyncio.run(evaluate_groups(stage, new_evaluations(inputs)[0], 0))
    trajectories = [group.trajectories[0] for group in groups]
    golds = [
        trajectory.reward.value if is_scored and trajectory.reward else None for trajectory in trajectories
    ]
    return Answers(
        messages=tuple(get_messages(group.prompt) for group in groups),
        texts=tuple(
            "".join(turn.completion.text for turn in trajectory.turns) for trajectory in trajectories
        ),
        gold=np.array(golds, float),
    )


def get_messages(prompt: Prompt) -> Messages:
    return prompt.messages or ({"role": "user", "content": prompt.text or ""},)


def compare_answers(recipe: Recipe, judge: str, ours: Answers, theirs: Answers) -> np.ndarray:
    """Return [n] 1 if the judge prefers ``ours``, -1 if it prefers ``theirs``, 0 for a tie or equal texts;
    NaN without a verdict."""
    (source,) = open_sources(judge)
    rows = zip(ours.messages, ours.texts, theirs.texts, strict=True)
    comparisons = Bench(recipe=resolve_auto(recipe), counters=Counter()).compare(source, rows)
    proxy = np.array([SCORES.get(comparison.choice, math.nan) for comparison in comparisons])
    is_same = np.array([a == b for a, b in zip(ours.texts, theirs.texts, strict=True)], bool)
    return np.where(is_same, 0.0, proxy)


def build_probe(step: int, ours: Answers, theirs: Answers, proxy: np.ndarray) -> Probe:
    """Build the probe of a look. ``ours``: answers of the policy that learns."""
    actions = Counter(classify_answer(text).value for text in ours.texts)
    return Probe(
        step=step,
        proxy=proxy,
        gold=ours.gold - theirs.gold,
        actions=actions,
        pairs=tuple(zip(ours.messages, ours.texts, theirs.texts, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Detectors that have been calibrated on the current policy. ``rate``: gold per proxy; ``scale``: the
    standard deviation of the difference in gold between two of its answers. Both are 0 without gold, and then
    only actions are counted."""

    detectors: tuple[Detector, ...]
    marked: tuple[
        tuple[str, Bets, Bets], ...
    ] = ()  # (mark, bets on the judge liking it, on its cost in gold)
    rate: float = 0.0
    scale: float = 0.0

    @classmethod
    def of(cls, quiet: Probe, cases: int, counted: Sequence[str], looks: int, false_alarms: float) -> Watch:
        """Calibrate detectors on ``quiet``, which compares two answers of the current policy, ``cases`` of
        which were counted. The chance of a false alarm in all ``looks`` is at most ``false_alarms``, a third
        for each kind of detector. If judge or gold is constant or mostly missing, only actions are
        watched."""
        share = false_alarms / 3
        rate_detectors: list[Detector] = [
            watch_rate(name, quiet.actions.get(name, 0), cases, rate=share / len(counted), steps=looks)
            for name in counted
        ]
        is_usable = ~(np.isnan(quiet.proxy) | np.isnan(quiet.gold))
        if is_usable.sum() < 8 or not np.ptp(quiet.proxy[is_usable]) or not np.ptp(quiet.gold[is_usable]):
            return cls(detectors=tuple(rate_detectors))
        marks = choose_marks(text for pair in quiet.texts for text in pair)
        alpha = share / len(marks)
        pairs = ((mark, Bets(name=f"{MARKED}{mark}", alpha=alpha)) for mark in marks)
        mark_bets = tuple((mark, bets_of_mark, bets_of_mark) for mark, bets_of_mark in pairs)
        bets = Bets(name="proxy against gold", alpha=share)
        return cls(
            detectors=(bets, *rate_detectors),
            marked=mark_bets,
            rate=exchange_rate(quiet.proxy[is_usable], quiet.gold[is_usable]),
            scale=float(np.std(quiet.gold[is_usable])),
        )

    def update(self, new_probe: Probe) -> tuple[Watch, list[Alarm]]:
        """Return the watch after one more look, and the look's alarms. A mark gives an alarm once both of its
        bets have."""
        detectors, alarms = list[Detector](), list[Alarm]()
        for state in self.detectors:
            new_state, alarm = self._update_detector(state, new_probe)
            detectors.append(new_state)
            alarms += [alarm] if alarm is not None else []
        mark_bets = list[tuple[str, Bets, Bets]]()
        for mark, likes, costs in self.marked:
            preference, cost = of_mark(new_probe.proxy, new_probe.gold, new_probe.texts, mark)
            # The cost counts only while the judge prefers the mark.
            cost = cost if preference.sum() > 0 else cost[:0]
            state, cost_state = likes.update(preference), costs.update(standardise(cost, self.scale))
            mark_bets.append((mark, state[0], cost_state[0]))
            mark_alarm = state[1] or cost_state[1]
            alarms += (
                [mark_alarm] if mark_alarm is not None and state[0].alarmed and cost_state[0].alarmed else []
            )
        return replace(self, detectors=tuple(detectors), marked=tuple(mark_bets)), alarms

    def _update_detector(self, detector: Detector, new_probe: Probe) -> tuple[Detector, Alarm | None]:
        """Give a detector its observations of one look."""
        is_usable = ~(np.isnan(new_probe.proxy) | np.isnan(new_probe.gold))
        match detector:
            case Bets():
                gaps = measure_divergence(new_probe.proxy[is_usable], new_probe.gold[is_usable], self.rate)
                return detector.update(standardise(gaps, self.scale))
            case Cusum():
                return detector.update(
                    (new_probe.actions.get(detector.name, 0), sum(new_probe.actions.values()))
                )
