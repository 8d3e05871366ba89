"""``ostinato bench draft``: epochs of a recipe, with training between them, under all kinds of drafts.

The run is recorded once with plain decoding (``epochs``); then each arm rolls out every step of it under the
policy of that step, interleaved, the order rotating, at several batch sizes. Tokens are compared with those
recorded: they may never differ. After a step every arm's history gets the same answers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

from lab.arms import Oracle, Pair, Rollout, nothing_known
from lab.epochs import Model, Step, record
from lab.harness import Bench, Result, Say, option
from lab.settings import Clock, with_dtype
from ostinato.config import Recipe
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.lengths import Lengths
from ostinato.history.rules import Rules, Source
from ostinato.history.store import History
from ostinato.model.named import find_model_folder
from ostinato.protocols import Drafter
from ostinato.types import Completion, Request


class Arm(StrEnum):
    """Who drafts. Published drafters (docs/measured.md) are last in commit 218876d."""

    OFF = "off"
    SIBLINGS = "siblings"  # the running group alone, without epochs (as Seer, arXiv 2511.14617)
    OURS = "ours"  # with history, the noise, and the forecast of lengths
    ORACLE = "oracle"  # knows the answer: what is left is the price of the passes


RULES = {Arm.SIBLINGS: Rules(sources=frozenset({Source.SIBLING, Source.OWN})), Arm.OURS: Rules()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Bench):
    """What is measured. ``batches`` are sequences that run together (``engine.max_batch``) while the recipe's
    prompts_per_step x group_size are requested at once; the first is the headline. ``rounds`` replays."""

    recipe: str = option("quickstart", "A recipe, by name or file.")
    prompts: int = option(64, "Of an epoch.")
    overrides: tuple[str, ...] = ()
    batches: tuple[int, ...] = option(
        (8, 4, 16, 64, 256),
        "How many sequences run together, with commas; the first is the headline.",
        "batch",
    )
    epochs: int = option(3, "Over all prompts.")
    rounds: int = option(2, "Replays of the whole run; medians count.")
    clock: Clock = option(Clock.WALL, "cpu is for one thread on a machine that others use too.")
    arms: tuple[Arm, ...] = tuple(Arm)

    @property
    def loaded(self) -> Recipe:
        """The recipe, with the dtype of a run on this machine."""
        return with_dtype(Recipe.load(self.recipe, f"task.n_train={self.prompts}", *self.overrides))

    def quick(self) -> Draft:
        return replace(self, prompts=32, batches=(8, 64), rounds=1)

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"--batch is {self.batches}; give sizes of at least 1, with commas")
        for name in ("epochs", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; use at least 1")

    def measure(self, say: Say) -> dict[str, Any]:
        recipe = self.loaded
        model = Model.load(
            str(find_model_folder(recipe.model.path)),
            dtype=recipe.model.dtype,
            fp32_head=recipe.model.fp32_head,
            say=say,
        )
        steps = record(recipe, model, self.epochs, say)
        rows: list[Measured] = []
        for batch in self.batches:
            pair = Pair(
                model,
                kv_memory_mb=512,
                max_batch=batch,
                context_limit=model.decoder.config.max_positions,
                clock=self.clock,
            )
            for round_ in range(self.rounds):
                rows += _replay(self, pair, steps, batch, round_)
                for line in _progress(self, rows, batch):
                    say(line)
        return summary(self, rows)

    @staticmethod
    def table(result: Result) -> Table:
        settings = result["settings"]
        epochs = [entry["epoch"] for entry in result["batches"][0]["arms"][0]["epochs"]]
        title = (
            f"rollouts of {settings['recipe']} ({settings['model']}, {settings['dtype']}): "
            f"{settings['asked_at_once']} sequences requested at once, at most 'batch' run together; "
            f"{settings['clock']} time"
        )
        out = Table("batch", "drafts", title=title, caption=_caption(result))
        for name in ("tokens per pass", "accepted of drafted", "seconds", "times as fast as off"):
            out.add_column(f"{name}\nepoch {' / '.join(map(str, epochs))}", justify="right")
        out.add_column("all\nepochs", justify="right")
        out.add_column("drafting\n(share of time)", justify="right")
        for entry in result["batches"]:
            for index, arm in enumerate(entry["arms"]):
                out.add_row("" if index else str(entry["batch"]), arm["name"], *_cells(arm))
            out.add_section()
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rollout of one step by one arm."""

    batch: int
    arm: Arm
    round: int
    epoch: int
    step: int
    seconds: float
    drafting_s: float  # of them, inside the drafter
    index_s: float  # before it, outside of the rollout: adding the step before to history
    tokens: int
    passes: int  # (sequence, pass) pairs that gave a token
    drafted: int
    accepted: int
    mismatches: int  # answers that differ from plain decoding's


@dataclass(slots=True)
class _Entrant:
    """An arm at work: its drafter, with its own history and its own calibration."""

    arm: Arm
    drafter: Drafter | None
    history: History | None = None
    forget: Callable[[], None] = lambda: None  # the texts of the step that is over
    expect: Callable[[Request], float] = nothing_known
    index_s: float = 0.0


def _replay(bench: Draft, pair: Pair, steps: Sequence[Step], batch: int, round_: int) -> Iterator[Measured]:
    """Every step by every arm, with fresh drafters and histories."""
    truth = {
        tuple(request.seed): answer.tokens
        for step in steps
        for request, answer in zip(step.requests, step.answers, strict=True)
    }
    entrants = [_entrant(arm, truth) for arm in bench.arms]
    pair.warm_up(steps[0].requests[:4])
    for step in steps:
        shift = (step.number + round_) % len(entrants)
        for contender in entrants[shift:] + entrants[:shift]:
            rollout = pair.rollout(contender.drafter, step.requests, step.adapters, contender.expect)
            yield _measured(bench, contender, step, rollout, batch, round_)
        for contender in entrants:
            contender.index_s = _learn(contender, step)


def _entrant(arm: Arm, truth: Mapping[tuple[int, ...], np.ndarray]) -> _Entrant:
    if arm is Arm.OFF:
        return _Entrant(arm=arm, drafter=None)
    if arm is Arm.ORACLE:
        return _Entrant(arm=arm, drafter=Oracle(truth))
    history = History() if arm is Arm.OURS else None
    drafter = HistoryDrafter(history, RULES[arm])
    contender = _Entrant(arm=arm, drafter=drafter, history=history, forget=drafter.forget)
    if arm is Arm.OURS and history is not None:
        contender.expect = partial(expected_length, history.lengths)
    return contender


def expected_length(lengths: Lengths, request: Request) -> float:
    """Tokens of the answer by the prompt's past; 0 while nothing is known."""
    forecast = lengths.predict(request.uid)
    return forecast if math.isfinite(forecast) else 0.0


def _measured(
    bench: Draft, contender: _Entrant, step: Step, rollout: Rollout, batch: int, round_: int
) -> Measured:
    return Measured(
        batch=batch,
        arm=contender.arm,
        round=round_,
        epoch=step.epoch,
        step=step.number,
        seconds=rollout.seconds,
        drafting_s=rollout.drafting_s,
        index_s=contender.index_s,
        tokens=rollout.tokens,
        passes=rollout.passes,
        drafted=rollout.drafted,
        accepted=rollout.accepted,
        mismatches=mismatches(step.answers, rollout.answers),
    )


def mismatches(recorded: Sequence[Completion], answers: Sequence[Completion]) -> int:
    """Answers whose tokens are not those recorded."""
    pairs = zip(recorded, answers, strict=True)
    return sum(not np.array_equal(one.tokens, other.tokens) for one, other in pairs)


def _learn(contender: _Entrant, step: Step) -> float:
    """Seconds to put the answers of ``step`` into the arm's history, index included."""
    start = time.perf_counter()
    if contender.history is not None:
        for uid, pasts in step.pasts.items():
            contender.history.add(uid, step.number, pasts)
        for uid, lengths in step.lengths.items():
            contender.history.lengths.observe(uid, lengths)
        contender.history.build_now()
    contender.forget()
    return time.perf_counter() - start


# ---- what it comes to


def summary(bench: Draft, rows: Sequence[Measured]) -> dict[str, Any]:
    """The JSON of the command, from its rows. A step's seconds are the median over rounds."""
    batches = [
        {"batch": batch, "arms": [_arm_entry(rows, batch, arm) for arm in bench.arms]}
        for batch in bench.batches
    ]
    headline = {entry["name"]: entry for entry in batches[0]["arms"]}
    ours = headline.pop(Arm.OURS, {"epochs": [], "total": {}})
    recipe = bench.loaded
    return {
        "epochs": ours["epochs"],
        "total": ours["total"],
        "baselines": list(headline.values()),
        "batches": batches,
        "best": best(batches),
        "mismatches": sum(row.mismatches for row in rows),
        "compared": recipe.rollout.prompts_per_step * recipe.rollout.group_size * len(rows),
        "settings": {
            "headline_batch": bench.batches[0],
            "batch_is": "sequences that run together (engine.max_batch)",
            "asked_at_once": recipe.rollout.prompts_per_step * recipe.rollout.group_size,
            "prompts": recipe.task.n_train,
            "temperature": recipe.rollout.temperature,
            "max_tokens": recipe.rollout.max_tokens,
            "model": recipe.model.path,
            "dtype": recipe.model.dtype,
            "recipe": recipe.name,
            "rounds": bench.rounds,
            "clock": str(bench.clock),
        },
    }


def _arm_entry(rows: Sequence[Measured], batch: int, arm: Arm) -> dict[str, Any]:
    """{"name", "epochs": [figures], "total": figures} of one arm at one batch size."""
    mine = [row for row in rows if row.batch == batch and row.arm is arm]
    plain = [row for row in rows if row.batch == batch and row.arm is Arm.OFF]
    epochs = sorted({row.epoch for row in mine})
    by_epoch = [
        {"epoch": epoch}
        | figures([r for r in mine if r.epoch == epoch], [r for r in plain if r.epoch == epoch])
        for epoch in epochs
    ]
    return {"name": str(arm), "epochs": by_epoch, "total": figures(mine, plain)}


def figures(rows: Sequence[Measured], plain: Sequence[Measured]) -> dict[str, float | None]:
    """Of one arm, against ``plain`` of the same steps: ``speedup`` is plain seconds over the arm's."""
    seconds, drafted = rollout_s(rows), sum(row.drafted for row in rows)
    passes = sum(row.passes for row in rows)
    return {
        "tokens_per_pass": _ratio(sum(row.tokens for row in rows), passes),
        "acceptance": _ratio(sum(row.accepted for row in rows), drafted),
        "drafted_per_pass": _ratio(drafted, passes),
        "rollout_s": round(seconds, 4),
        "speedup": _ratio(rollout_s(plain), seconds),
        "drafting_share": _ratio(sum(row.drafting_s for row in rows), sum(row.seconds for row in rows), 5),
        "index_s": round(statistics.median(_by_round(rows, "index_s")), 4),
    }


def rollout_s(rows: Iterable[Measured]) -> float:
    """Seconds of all steps together, each the median of its rounds."""
    steps: dict[int, list[float]] = {}
    for row in rows:
        steps.setdefault(row.step, []).append(row.seconds)
    return sum(statistics.median(seconds) for seconds in steps.values())


def _by_round(rows: Sequence[Measured], name: str) -> list[float]:
    """The sum over steps of a field, for every round."""
    rounds = sorted({row.round for row in rows})
    return [sum(getattr(row, name) for row in rows if row.round == round_) for round_ in rounds]


def best(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each arm at the batch size that suits it best, over all epochs: compare these where the choice is
    free."""
    fastest: dict[str, tuple[float, int]] = {}
    for entry in batches:
        for arm in entry["arms"]:
            place = (arm["total"]["rollout_s"], entry["batch"])
            fastest[arm["name"]] = min(fastest.get(arm["name"], place), place)
    plain = fastest.get(Arm.OFF, (float("nan"), 0))[0]
    return {
        name: {"batch": batch, "rollout_s": seconds, "speedup": _ratio(plain, seconds)}
        for name, (seconds, batch) in fastest.items()
    }


def _ratio(above: float, below: float, digits: int = 4) -> float | None:
    return round(above / below, digits) if below else None


def _progress(bench: Draft, rows: Sequence[Measured], batch: int) -> Iterator[str]:
    for arm in bench.arms:
        if arm is not Arm.OFF:
            total = _arm_entry(rows, batch, arm)["total"]
            yield f"batch {batch}: {arm} {_form(total['speedup'], '.2f')}x as fast as without drafts"


def _cells(arm: Mapping[str, Any]) -> list[str]:
    """The cells of one arm, behind its name."""
    by_epoch = (("tokens_per_pass", ".2f"), ("acceptance", ".0%"), ("rollout_s", ".2f"), ("speedup", ".2f"))
    cells = [" / ".join(_form(epoch[name], form) for epoch in arm["epochs"]) for name, form in by_epoch]
    total = arm["total"]
    return [*cells, f"{_form(total['speedup'], '.2f')}x", _form(total["drafting_share"], ".1%")]


def _caption(result: Mapping[str, Any]) -> str:
    fastest = result["best"]
    lines = [f"{result['mismatches']} of {result['compared']} answers differ from those without drafts"]
    if {Arm.OFF, Arm.OURS} <= fastest.keys():
        off, ours = fastest[Arm.OFF], fastest[Arm.OURS]
        lines.append(
            f"each at its best batch size: off {off['rollout_s']:.2f} s at {off['batch']}, "
            f"ours {ours['rollout_s']:.2f} s at {ours['batch']}, {_form(ours['speedup'], '.2f')}x"
        )
    return "\n".join(lines)


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
