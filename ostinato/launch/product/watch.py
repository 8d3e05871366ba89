"""What the detectors see of a policy that is trained: fresh answers of it and of the policy in office.

    Probe   n new prompts, one answer of each policy; who is better by the judge, by how much by gold
    Watch   the detectors, told by every probe so far: the same after a kill as without one

Successive measurements of one policy would share prompts and noise, which no bet may: each look has its own.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ostinato.config import Recipe, override
from ostinato.launch.dtype import resolved
from ostinato.launch.judges import sources
from ostinato.launch.panel import Bench
from ostinato.observe.bets import Alarm, Bets
from ostinato.product.actions import action_of
from ostinato.product.detectors import (
    Cusum,
    Detector,
    Knee,
    divergence,
    exchange_rate,
    standardised,
    watch_rate,
)
from ostinato.product.judging import Choice
from ostinato.types import Prompt

EXEMPLARS = 24  # of one alarm
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
    """What one look measured. ``proxy``: 1 where the judge prefers the policy that learns, -1 the other, NaN
    without a verdict; ``gold``: by how much it is better by gold."""

    step: int
    proxy: np.ndarray  # [n]
    gold: np.ndarray  # [n]
    actions: Mapping[str, int]
    kl: float | None = None
    exemplars: tuple[dict[str, Any], ...] = ()  # that judge and gold disagree about, the clearest first

    def row(self) -> dict[str, Any]:
        plain = {"step": self.step, "kl": self.kl, "actions": dict(self.actions)}
        return {**plain, "proxy": self.proxy, "gold": self.gold, "exemplars": list(self.exemplars)}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Probe:
        proxy, gold = (np.array(row[name], float) for name in ("proxy", "gold"))  # null: NaN
        return cls(
            step=row["step"],
            proxy=proxy,
            gold=gold,
            actions=row["actions"],
            kl=row["kl"],
            exemplars=tuple(row["exemplars"]),
        )


def answers(recipe: Recipe, adapter: str, gold: str, n: int, *, prompts: int, noise: int) -> Answers:
    """Of the policy in ``adapter`` to the n evaluation prompts of draw ``prompts``, with the noise of draw
    ``noise``. ``gold``: a reward function; "": none."""
    from ostinato.launch.engine import new_engine
    from ostinato.launch.inputs import new_stage, prepare
    from ostinato.launch.loop import new_evaluations
    from ostinato.launch.trainer import new_adapters
    from ostinato.pipeline.evaluate import evaluate_groups

    given = [f"task.seed={recipe.task.seed + APART * prompts}", f"seed={recipe.seed + APART * noise}"]
    given += [f'reward.functions=["{gold or "none"}"]', "reward.weights=[]", f"eval.n={n}", "eval.k=1"]
    given += ["eval.start_factor=1", f"adapter.path={adapter}"]
    recipe = resolved(Recipe.parse(override(recipe.model_dump(mode="json"), given)))
    with prepare(recipe, training=False) as prepared:
        adapters = new_adapters(recipe, prepared.decoder) if adapter else None
        engine = new_engine(recipe, prepared.decoder, prepared.renderer)
        engine.publish(adapters, 0)
        stage = new_stage(prepared, engine, prepared.grader)
        _, groups = asyncio.run(evaluate_groups(stage, new_evaluations(prepared)[0], 0))
    played = [group.trajectories[0] for group in groups]
    golds = [one.reward.value if gold and one.reward else None for one in played]
    return Answers(
        messages=tuple(chat(group.prompt) for group in groups),
        texts=tuple("".join(turn.completion.text for turn in one.turns) for one in played),
        gold=np.array(golds, float),
    )


def chat(prompt: Prompt) -> Messages:
    return prompt.messages or ({"role": "user", "content": prompt.text or ""},)


def preferred(recipe: Recipe, judge: str, ours: Answers, theirs: Answers) -> np.ndarray:
    """[n] 1 where the judge prefers ``ours``, -1 ``theirs``, 0 neither; NaN where it has no verdict."""
    (source,) = sources(judge)
    opened = Bench(recipe=resolved(recipe), counters=Counter()).judge(source)

    async def compared() -> list[float]:
        rows = zip(ours.messages, ours.texts, theirs.texts, strict=True)
        found = await asyncio.gather(*(opened.compare(asked, [(a, b)]) for asked, a, b in rows))
        return [SCORES.get(one.choice, math.nan) for (one,) in found]

    proxy = np.array(asyncio.run(compared()))
    same = np.array([a == b for a, b in zip(ours.texts, theirs.texts, strict=True)], bool)
    return np.where(same, 0.0, proxy)


def probe(step: int, kl: float | None, ours: Answers, theirs: Answers, proxy: np.ndarray) -> Probe:
    """``ours``: of the policy that learns."""
    gain = ours.gold - theirs.gold
    gap = np.where(np.isnan(proxy) | np.isnan(gain), 0.0, np.minimum(proxy, -gain))  # judge up, gold down
    clearest = sorted(np.flatnonzero(gap > 0), key=lambda at: float(gain[at]))[:EXEMPLARS]
    rows = (
        {"messages": list(ours.messages[at]), "chosen": theirs.texts[at], "rejected": ours.texts[at]}
        for at in clearest
    )
    actions = Counter(action_of(text).value for text in ours.texts)
    return Probe(step=step, proxy=proxy, gold=gain, actions=actions, kl=kl, exemplars=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Detectors that have been calibrated on the policy in office. ``rate``: gold per proxy; ``scale``: the
    deviation of gold between two of its answers. Both 0 without gold: then only actions are counted."""

    detectors: tuple[Detector, ...]
    rate: float = 0.0
    scale: float = 0.0

    @classmethod
    def of(cls, quiet: Probe, cases: int, counted: Sequence[str], looks: int, false_alarms: float) -> Watch:
        """``quiet``: two answers of the policy in office compared, ``cases`` of which were counted. The
        chance of a false alarm in all ``looks`` is at most ``false_alarms``, a third of it for each kind."""
        share = false_alarms / 3
        found: list[Detector] = [
            watch_rate(name, quiet.actions.get(name, 0), cases, rate=share / len(counted), steps=looks)
            for name in counted
        ]
        known = ~(np.isnan(quiet.proxy) | np.isnan(quiet.gold))
        if known.sum() < 8 or not np.ptp(quiet.proxy[known]) or not np.ptp(quiet.gold[known]):
            return cls(detectors=tuple(found))
        bets = Bets(name="proxy against gold", alpha=share)
        return cls(
            detectors=(bets, Knee(alpha=share), *found),
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
        return replace(self, detectors=tuple(found)), alarms

    def _updated(self, one: Detector, seen: Probe) -> tuple[Detector, Alarm | None]:
        known = ~(np.isnan(seen.proxy) | np.isnan(seen.gold))
        match one:
            case Bets():
                apart = divergence(seen.proxy[known], seen.gold[known], self.rate)
                return one.update(standardised(apart, self.scale))
            case Knee():
                if not seen.kl or seen.kl <= 0 or known.sum() < 2:
                    return one, None
                gold = seen.gold[known]
                error = float(np.std(gold, ddof=1) / math.sqrt(len(gold)))
                return one.update((seen.kl, float(gold.mean()), error)) if error else (one, None)
            case Cusum():
                return one.update((seen.actions.get(one.name, 0), sum(seen.actions.values())))


__all__ = ["Answers", "Probe", "Watch", "answers", "chat", "preferred", "probe"]
