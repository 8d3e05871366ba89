"""What the detectors see of a policy that is trained: fresh answers of it and of what it was before.

    Probe   n new prompts, one answer of the policy that learns and of what it was some looks before (first:
            the current one); who is better by the judge, by how much by gold
    Watch   the detectors, fed every probe so far: the same after a kill as without one

Beside the current policy what was gained at first would hide what is lost behind it. Successive looks at
one policy would share prompts and noise, which no bet may: each look has its own, of both policies.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.apps.product.actions import action_of
from ostinato.apps.product.detectors import (
    Cusum,
    Detector,
    divergence,
    exchange_rate,
    of_mark,
    side,
    standardise,
    usual_marks,
    watch_rate,
)
from ostinato.apps.product.judges import sources
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
    """One answer to each of n prompts; ``gold`` is NaN where there is none."""

    messages: tuple[Messages, ...]
    texts: tuple[str, ...]
    gold: np.ndarray  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one look measured, beside the policy of some looks before. ``proxy``: 1 where the judge prefers
    the policy that learns, -1 the other, NaN without a verdict; ``gold``: by how much it is better by gold;
    ``pairs``: the chat and both answers."""

    step: int
    proxy: np.ndarray  # [n]
    gold: np.ndarray  # [n]
    actions: Mapping[str, int]
    pairs: tuple[tuple[Messages, str, str], ...] = ()  # [n]

    def row(self) -> dict[str, Any]:
        plain = {"step": self.step, "actions": dict(self.actions), "proxy": self.proxy, "gold": self.gold}
        return plain | {"pairs": [[*pair] for pair in self.pairs]}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Probe:
        proxy, gold = (np.array(row[name], float) for name in ("proxy", "gold"))  # null: NaN
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
        """Pairs about which judge and gold disagree, the clearest first; ``mark``: those alone in which the
        judge prefers the one that has it."""
        against = np.where(np.isnan(self.proxy) | np.isnan(self.gold), 0.0, -self.proxy * self.gold)
        found = []
        for at in sorted(np.flatnonzero(against > 0), key=lambda at: -against[at]):
            chat, *texts = self.pairs[at]
            rejected, chosen = texts if self.proxy[at] > 0 else texts[::-1]
            if not mark or side((rejected, chosen), mark) > 0:
                row = {"messages": [dict(one) for one in chat], "chosen": chosen, "rejected": rejected}
                found.append(row | ({"name": mark} if mark else {}))
        return found[:EXEMPLARS]


def answers(
    recipe: Recipe, adapters: Sequence[tuple[str, int]], gold: str, n: int, *, prompts: int
) -> list[Answers]:
    """Of each policy in ``adapters`` ((adapter, noise): one draw of noise each) to the n evaluation prompts
    of draw ``prompts``. ``gold``: a reward function; "": none."""
    from ostinato.launch.inputs import prepare

    given = [f"task.seed={recipe.task.seed + APART * prompts}", "eval.k=1", "eval.start_factor=1"]
    given += [f'reward.functions=["{gold or "none"}"]', "reward.weights=[]", f"eval.n={n}"]
    each = [
        resolve_auto(Recipe.parse(override(recipe.model_dump(mode="json"), [*given, *own])))
        for own in (
            [f"adapter.path={adapter}", f"seed={recipe.seed + APART * noise}"] for adapter, noise in adapters
        )
    ]
    with prepare(each[0], training=False) as inputs:
        return [_answer(replace(inputs, recipe=one), bool(gold)) for one in each]


def _answer(inputs: RunInputs, scored: bool) -> Answers:
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
    played = [group.trajectories[0] for group in groups]
    golds = [one.reward.value if scored and one.reward else None for one in played]
    return Answers(
        messages=tuple(chat(group.prompt) for group in groups),
        texts=tuple("".join(turn.completion.text for turn in one.turns) for one in played),
        gold=np.array(golds, float),
    )


def chat(prompt: Prompt) -> Messages:
    return prompt.messages or ({"role": "user", "content": prompt.text or ""},)


def prefer(recipe: Recipe, judge: str, ours: Answers, theirs: Answers) -> np.ndarray:
    """[n] 1 where the judge prefers ``ours``, -1 ``theirs``, 0 neither; NaN where it has no verdict."""
    (source,) = sources(judge)
    rows = zip(ours.messages, ours.texts, theirs.texts, strict=True)
    found = Bench(recipe=resolve_auto(recipe), counters=Counter()).compared(source, rows)
    proxy = np.array([SCORES.get(one.choice, math.nan) for one in found])
    same = np.array([a == b for a, b in zip(ours.texts, theirs.texts, strict=True)], bool)
    return np.where(same, 0.0, proxy)


def probe(step: int, ours: Answers, theirs: Answers, proxy: np.ndarray) -> Probe:
    """``ours``: of the policy that learns."""
    actions = Counter(action_of(text).value for text in ours.texts)
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
    deviation of gold between two of its answers; both 0 without gold: then only actions are counted."""

    detectors: tuple[Detector, ...]
    marked: tuple[tuple[str, Bets, Bets], ...] = ()  # a mark: is it preferred, does it cost gold?
    rate: float = 0.0
    scale: float = 0.0

    @classmethod
    def of(cls, quiet: Probe, cases: int, counted: Sequence[str], looks: int, false_alarms: float) -> Watch:
        """``quiet``: two answers of the current policy compared, ``cases`` of which were counted. The
        chance of a false alarm in all ``looks`` is at most ``false_alarms``, a third for each kind."""
        share = false_alarms / 3
        found: list[Detector] = [
            watch_rate(name, quiet.actions.get(name, 0), cases, rate=share / len(counted), steps=looks)
            for name in counted
        ]
        known = ~(np.isnan(quiet.proxy) | np.isnan(quiet.gold))
        if known.sum() < 8 or not np.ptp(quiet.proxy[known]) or not np.ptp(quiet.gold[known]):
            return cls(detectors=tuple(found))
        usual = usual_marks(text for pair in quiet.texts for text in pair)
        alpha = share / len(usual)
        pairs = ((one, Bets(name=f"{MARKED}{one}", alpha=alpha)) for one in usual)
        marked = tuple((one, fresh, fresh) for one, fresh in pairs)
        bets = Bets(name="proxy against gold", alpha=share)
        return cls(
            detectors=(bets, *found),
            marked=marked,
            rate=exchange_rate(quiet.proxy[known], quiet.gold[known]),
            scale=float(np.std(quiet.gold[known])),
        )

    def update(self, seen: Probe) -> tuple[Watch, list[Alarm]]:
        """With one look."""
        found, alarms = list[Detector](), list[Alarm]()
        for one in self.detectors:
            after, alarm = self._updated(one, seen)
            found.append(after)
            alarms += [alarm] if alarm is not None else []
        marked = list[tuple[str, Bets, Bets]]()
        for mark, likes, costs in self.marked:
            liked, lost = of_mark(seen.proxy, seen.gold, seen.texts, mark)
            lost = lost if liked.sum() > 0 else lost[:0]  # not what it preferred some looks ago
            one, other = likes.update(liked), costs.update(standardise(lost, self.scale))
            marked.append((mark, one[0], other[0]))
            new = one[1] or other[1]
            alarms += [new] if new is not None and one[0].alarmed and other[0].alarmed else []
        return replace(self, detectors=tuple(found), marked=tuple(marked)), alarms

    def _updated(self, one: Detector, seen: Probe) -> tuple[Detector, Alarm | None]:
        known = ~(np.isnan(seen.proxy) | np.isnan(seen.gold))
        match one:
            case Bets():
                apart = divergence(seen.proxy[known], seen.gold[known], self.rate)
                return one.update(standardise(apart, self.scale))
            case Cusum():
                return one.update((seen.actions.get(one.name, 0), sum(seen.actions.values())))
