"""What a run is scored on: the held-out set, the same one greedily, and the downstream sets of
``[eval.downstream.NAME]``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ostinato.config import DownstreamSection, Recipe
from ostinato.config.paths import without_folders
from ostinato.env.mixture import label_prompts
from ostinato.env.rows import with_columns
from ostinato.env.tasks import check_disjoint, load_tasks
from ostinato.every import NEVER, Every
from ostinato.pipeline.evaluate import Evaluation
from ostinato.run import GREEDY_SET, MAIN_SET
from ostinato.types import Prompt, Sampling


def downstream_prompts(recipe: Recipe, trained_on: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each downstream set by name. Raises ValueError, with the name, for what cannot be read,
    and for a set of the training's own source that shares prompts with it."""
    sets = recipe.eval.downstream
    return {
        name: _named(name, lambda each=each: _prompts(recipe, each, trained_on))
        for name, each in sets.items()
    }


def _prompts(recipe: Recipe, section: DownstreamSection, trained_on: Sequence[Prompt]) -> list[Prompt]:
    name = section.task or next(iter(recipe.task.by_name))
    seed, task = recipe.task.seed, recipe.task.by_name[name]
    n, params = section.n or None, section.params
    rows = load_tasks(section.source, section.split, seed, n, params, task.system_prompt)
    prompts = with_columns(rows, task.columns)
    if section.source in {task.source for task in recipe.task.by_name.values()}:
        check_disjoint(trained_on, prompts)
    return label_prompts(prompts, name)


def _named(name: str, load: Callable[[], list[Prompt]]) -> list[Prompt]:
    try:
        return load()
    except ValueError as error:
        raise ValueError(f"eval.downstream.{name}: {error}") from error


def evaluations(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    downstream: Mapping[str, Sequence[Prompt]],
    *,
    stop_tokens: tuple[int, ...],
    solved_at: float,
    weights: str,
) -> list[Evaluation]:
    """The main evaluation on ``prompts``; unless it is greedy itself, one greedy answer to each of them
    before and after training; then those on ``downstream``, in the order of the recipe."""

    def made(name: str, prompts: Sequence[Prompt], split: str, k: int, every: int | str) -> Evaluation:
        return Evaluation(
            name=name,
            split=split,
            prompts=prompts,
            sampling=sampling,
            samples=k,
            k=k,
            solved_at=solved_at,
            seed=recipe.seed,
            weights=weights,
            every=Every.parse(every, "every"),
            budget=Every.parse(recipe.trainer.budget, "trainer.budget"),
            shares=recipe.eval.shares if name == MAIN_SET else (),
            start_factor=recipe.eval.start_factor,
            rules=rules(recipe),
        )

    main, rollout = recipe.eval, recipe.rollout
    thinking, answer = rollout.interrupt_after[1:], rollout.answer_tokens
    sampling = Sampling(
        temperature=main.temperature,
        # rollout.max_tokens is not used where thinking is interrupted: no part of the set's identity then
        max_tokens=sum(thinking) + answer if thinking else rollout.max_tokens,
        stop_tokens=stop_tokens,
        stop_strings=rollout.stop,
    )
    others = [(name, main.downstream[name], rows) for name, rows in downstream.items()]
    sampled = made(MAIN_SET, prompts, main.split, main.k, main.every)
    return [
        sampled,
        *([greedy(sampled)] if sampling.temperature else []),
        *(made(name, rows, each.split, each.k, each.every) for name, each, rows in others),
    ]


def greedy(sampled: Evaluation) -> Evaluation:
    """One answer at temperature 0 to each prompt of ``sampled``, before and after training."""
    one = {"samples": 1, "k": 1, "start_factor": 1, "every": NEVER, "shares": ()}
    return replace(sampled, name=GREEDY_SET, sampling=replace(sampled.sampling, temperature=0.0), **one)


def rules(recipe: Recipe) -> str:
    """What decides the score of an answer, and how it comes about, beside prompt and sampling: as JSON, the
    same in any folder."""
    tree = without_folders(recipe.model_dump(mode="json"), Recipe)
    interruption = ("interrupt_after", "answer_tokens", "interrupt_phrase", "think_end")
    mixed = ("mix",) if recipe.task.mix else ()
    keys = {
        "reward": ("functions", "weights"),
        "task": ("tools", "max_turns", *mixed),
        "rollout": interruption if recipe.rollout.interrupt_after else (),
    }
    return json.dumps({section: [tree[section][key] for key in names] for section, names in keys.items()})
