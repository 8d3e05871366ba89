"""Open judges on engines, which share a base, or at an address; score answers by several of them together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ostinato.apps.product.judge import Cache, Chat, Compared, Judge, Score
from ostinato.apps.product.judges import (
    AddressWriter,
    EngineSeconds,
    EngineWriter,
    Source,
    is_judge,
    open_sources,
)
from ostinato.config import Recipe
from ostinato.launch.engine import new_engine
from ostinato.launch.machine import resolve_auto
from ostinato.launch.models import load_decoder
from ostinato.model.decoder import Decoder
from ostinato.model.named import find_model_folder
from ostinato.model.peft_io import load_peft
from ostinato.render import Renderer
from ostinato.reward.worker import Fault
from ostinato.reward.workers import JUDGE
from ostinato.types import Prompt

SKIPPED: Score = (None, "", "")


class Panel:
    """Score answers by the mean of several judges; implements reward.workers.Scorer. An answer has no score
    if one of the judges gives it none. Beside the judges' own ``counters``, judge/scored counts scored
    answers, and judge/variance sums the variance among the judges over them.

    Siblings are judged together. A single answer (of an evaluation) is judged against the row's reference
    ``answer``, and skipped without one.
    """

    def __init__(self, judges: Sequence[Judge], *, timeout_s: float, counters: Counter[str]) -> None:
        self._judges, self._timeout_s, self._counters = judges, timeout_s, counters

    async def score(self, prompt: Prompt, answers: Sequence[str]) -> list[Score]:
        """Return the mean score of the judges for each answer, or a fault. A judge that takes longer than the
        limit is a fault of all answers."""
        messages = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
        scores_of = await asyncio.gather(
            *(self._score_by(judge, messages, prompt, answers) for judge in self._judges)
        )
        return [self._average(scores) for scores in zip(*scores_of, strict=True)]

    async def _score_by(
        self, judge: Judge, messages: Chat, prompt: Prompt, answers: Sequence[str]
    ) -> list[Score]:
        candidates = list(answers)
        if len(answers) == 1:
            if not isinstance(reference := prompt.columns.get("answer"), str | int | float):
                return [SKIPPED]
            candidates.append(str(reference))
        try:
            async with asyncio.timeout(self._timeout_s):
                return (await judge.score(messages, candidates))[: len(answers)]
        except TimeoutError:
            detail = f"no verdict in reward.judge_timeout_s={self._timeout_s:g} s"
            return [(None, Fault.TIMEOUT, detail)] * len(answers)

    def _average(self, verdicts: Sequence[Score]) -> Score:
        values = [value for value, _, _ in verdicts if value is not None]
        if len(values) < len(verdicts):
            return next(verdict for verdict in verdicts if verdict[0] is None)
        self._counters["judge/scored"] += 1
        self._counters["judge/variance"] += float(np.var(values))  # type: ignore[assignment]
        return float(np.mean(values)), "", ""

    def close(self) -> None:
        """Do nothing: engines end with the process, and addresses hold no resources."""


@dataclass(kw_only=True)
class Bench:
    """Opens judges: one engine for each base, which serves its adapters side by side. An engine uses the
    tensors of ``decoder`` where its base is ``folder``, unless the policy trains all of them."""

    recipe: Recipe
    counters: Counter[str]
    folder: Path | None = None
    decoder: Decoder | None = None

    def __post_init__(self) -> None:
        self.engines: dict[Path, tuple[EngineSeconds, Renderer]] = {}
        self._cache = Cache()

    def judge(self, source: Source) -> Judge:
        """Open the judge of a source, at an address or on the engine of its base. Loads the engine if it is
        new, and publishes the adapter on it."""
        if source.address:
            return Judge(
                source.spec,
                source.revision,
                AddressWriter(source.address, self.counters),
                self._cache,
                self.counters,
            )
        timed_engine, renderer = self._get_engine(find_model_folder(source.spec.model))
        policy, engine = "", timed_engine.engine
        if source.adapter is not None:
            policy = source.revision
            engine.publish(load_peft(source.adapter, engine.decoder), 0, policy)
        writer = EngineWriter(timed_engine.generate, renderer, policy, engine.context_limit, self.counters)
        return Judge(source.spec, source.revision, writer, self._cache, self.counters)

    def compare(self, source: Source, rows: Iterable[tuple[Chat, str, str]]) -> list[Compared]:
        """Open the judge and compare the two answers of every row (chat, answer, other answer) in both
        orders. Runs an event loop of its own."""
        return asyncio.run(self.judge(source).compare_each(rows))

    def _get_engine(self, base: Path) -> tuple[EngineSeconds, Renderer]:
        """Return the engine of a base and its renderer. They are made at the first call."""
        if (path := base.resolve()) not in self.engines:
            recipe, renderer = self.recipe, Renderer(base)
            is_shared = (
                self.folder is not None and self.folder.resolve() == path and recipe.adapter.kind == "lora"
            )
            decoder = self.decoder if is_shared else None
            if decoder is None:
                model = recipe.model.model_copy(update={"path": str(base)})
                decoder = load_decoder(resolve_auto(recipe.model_copy(update={"model": model})).model, base)
            engine_settings = recipe.engine.model_copy(update={"weights": "model"})
            engine = new_engine(
                recipe.model_copy(update={"engine": engine_settings}), decoder, renderer, name="judge"
            )
            self.engines[path] = EngineSeconds(engine, self.counters), renderer
        return self.engines[path]


def open_panels(recipe: Recipe, decoder: Decoder, folder: Path, counters: Counter[str]) -> dict[str, Panel]:
    """Open the judges among reward.functions; return their panels by name. Raises ValueError for a judge that
    cannot be opened."""
    bench = Bench(recipe=recipe, counters=counters, folder=folder, decoder=decoder)
    reward = recipe.reward
    return {
        function: Panel(
            [bench.judge(source) for source in open_sources(function.removeprefix(JUDGE))],
            timeout_s=reward.judge_timeout_s,
            counters=counters,
        )
        for function in filter(is_judge, reward.functions)
    }
