"""``ostinato data``: report on the rows of a recipe or a file before anything is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ostinato.config import Recipe
from ostinato.env.custom import SEEDS
from ostinato.launch.graders import new_grader
from ostinato.launch.inputs import (
    find_longest_answer,
    find_overlong,
    group_by_task,
    load_tools,
    new_episode_factory,
    read_prompts,
)
from ostinato.launch.models import load_recipe, read_facts
from ostinato.model.named import find_model_folder
from ostinato.protocols import Env
from ostinato.render import Renderer
from ostinato.reward.own_answers import FULL, SHOWN, OwnVerdict, spread_prompts
from ostinato.reward.workers import JUDGE
from ostinato.rollout.rollout import close_env, start_env
from ostinato.terminal import announce_work, say
from ostinato.types import Prompt

MEASURED = 10_000  # prompts that are tokenised for the table of lengths
EXAMPLES = 2  # answers below full reward that are printed
FILES = (".jsonl", ".ndjson", ".parquet")
# Built-in rewards that are tried on the answers of a file.
COMPARED = ("numeric", "math_verify", "code_tests", "exact")


def data(target: str, overrides: Sequence[str], *, model: str, row: int) -> None:
    """Print a report on ``target``, a recipe or a file of rows: number and lengths of its prompts, prompt
    number ``row`` (from 1) as the model reads it, and each reward's verdicts on the rows' own answers."""
    is_file = target.endswith(FILES)
    if is_file:
        settings = [f"task.source={target}", "task.n_train=0", *([f"model.path={model}"] if model else [])]
        recipe = Recipe.load({}, *settings, *overrides)
    else:
        recipe = load_recipe(target, *([f"model.path={model}"] if model else []), *overrides)[0]
    folder = find_model_folder(recipe.model.path)
    renderer, context = (
        Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs),
        read_facts(recipe.model, folder).max_positions,
    )
    rows, tools = read_prompts(recipe, "train", None), load_tools(recipe.task)
    held_out = _held_out(recipe)
    too_long = {  # without a hold-out a row is in both sets
        prompt.where
        for task_rows in group_by_task([*rows, *held_out]).values()
        for prompt in find_overlong(_filter_overlong(recipe), task_rows, renderer, context, tools)
    }
    if not 1 <= row <= len(rows):
        raise ValueError(f"--row is {row}; there are rows 1 to {len(rows)}")
    say(*_counts(recipe, rows, held_out, len(too_long)))
    episode = new_episode_factory(recipe, renderer, tools)
    say(_lengths(recipe, rows, episode, renderer, context), *_prompt(rows[row - 1], episode, renderer))
    functions = list(COMPARED) if is_file and not any("reward." in text for text in overrides) else None
    with announce_work("calling the rewards on the rows' own answers"):
        for task_rows in group_by_task(rows).values():
            for function in functions or recipe.reward.functions:
                if not function.startswith(JUDGE):
                    for line in _explain_verdicts(recipe, task_rows, function, functions is not None):
                        say(line)


def _held_out(recipe: Recipe) -> list[Prompt]:
    """The rows to evaluate on; empty for a file without a hold-out."""
    try:
        return read_prompts(recipe, recipe.eval.split, None)
    except ValueError:
        return []


def _filter_overlong(recipe: Recipe) -> Recipe:
    """A copy of the recipe that filters rows that are too long, so that they are counted and not refused."""
    task = recipe.task.model_copy(update={"overlong": "filter"})
    mix = tuple(section.model_copy(update={"overlong": "filter"}) for section in task.mix)
    return recipe.model_copy(update={"task": task.model_copy(update={"mix": mix})})


def _counts(
    recipe: Recipe, rows: Sequence[Prompt], held_out: Sequence[Prompt], too_long: int
) -> Iterator[str]:
    """Lines on the numbers of rows: to train on, held out, too long."""
    sources = ", ".join(task.rows_from for task in recipe.task.by_name.values())
    columns = ", ".join(dict.fromkeys(name for row in rows[:100] for name in row.columns))
    fixed = [row for row in rows if recipe.task.by_name[row.task].source != SEEDS]  # games may begin alike
    repeats = len(fixed) - len({(row.text, str(row.messages)) for row in fixed})
    twice = f", {repeats} ask what another asks" if repeats else ""
    yield f"rows         {sources}: {len(rows)} to train on{twice}; columns for rewards: {columns or 'none'}"
    if held_out and {row.uid for row in held_out} & {row.uid for row in rows}:
        yield "held out     none: set task.params.holdout to a share of the rows, e.g. 0.1"
    else:
        yield f"held out     {len(held_out)}"
    refused = (
        "left out"
        if recipe.task.overlong == "filter"
        else 'refused; task.overlong = "filter" leaves them out'
    )
    yield f"too long     {too_long}" + (f", {refused}" if too_long else "")


def _lengths(
    recipe: Recipe, rows: Sequence[Prompt], episode: Callable[[Prompt], Env], renderer: Renderer, context: int
) -> str:
    """The line on the lengths of prompts and answers in tokens, from at most MEASURED rows."""
    sample = [rows[k] for k in np.linspace(0, len(rows) - 1, min(len(rows), MEASURED)).astype(int).tolist()]

    async def measure() -> list[int]:
        lengths = []
        for row in sample:
            env = episode(row)
            lengths.append(len(await start_env(env)))
            await close_env(env)
        return lengths

    lengths = sorted(asyncio.run(measure()))
    sample_note = "" if len(sample) == len(rows) else f" of {len(sample)} of them"
    longest, keys = find_longest_answer(recipe.rollout, renderer)
    median = lengths[len(lengths) // 2]
    return (
        f"length       prompts{sample_note} have {lengths[0]} to {lengths[-1]} tokens (median {median}); "
        f"an answer up to {longest} ({keys}); the context of {recipe.model.path} is {context}"
    )


def _prompt(row: Prompt, episode: Callable[[Prompt], Env], renderer: Renderer) -> Iterator[str]:
    """Lines of one prompt: its text as the model reads it, its token ids, its reference answer."""
    tokens = asyncio.run(start_env(episode(row)))
    yield f"prompt       {row.where}, {len(tokens)} tokens, as the model reads it:"
    yield from ("  " + line for line in renderer.decode(tokens, skip_special=False).split("\n"))
    yield f"tokens       {tokens.tolist()}"
    if (answer := row.columns.get("answer")) is not None:
        yield f"answer       {str(answer)[:SHOWN]!r}"


def iterate_own_verdicts(
    recipe: Recipe, rows: Sequence[Prompt], function: str
) -> Iterator[tuple[str, list[OwnVerdict]]]:
    """Yield (reward name, its verdicts on the own answers of a sample of ``rows``), all of one task."""
    reward = recipe.reward.model_copy(update={"functions": (function,), "weights": ()})
    task = recipe.task.model_copy(update={"mix": ()})
    grader = new_grader(recipe.model_copy(update={"reward": reward, "task": task}))
    try:
        for _, name, verdicts in grader.iterate_own_verdicts(
            spread_prompts(rows), lambda text: list(text.encode())
        ):
            yield name, verdicts
    finally:
        grader.close()


def _explain_verdicts(recipe: Recipe, rows: Sequence[Prompt], function: str, tried: bool) -> Iterator[str]:
    """Lines on the verdicts of a reward on the rows' own answers, with examples below full reward. ``tried``:
    it is one of several that nobody has named, and is left out where it has none."""
    try:
        verdicts_by_name = list(iterate_own_verdicts(recipe, rows, function))
    except ValueError as error:
        yield f"reward       {function}: {error}"
        return
    for name, verdicts in verdicts_by_name:
        full = [verdict for verdict in verdicts if verdict.value is not None and verdict.value >= FULL]
        if not verdicts:
            yield f"reward       {name}: the rows have no own answer that it could judge"
            continue
        if tried and all(verdict.value is None for verdict in verdicts):
            continue  # the rows are not of its kind
        yield f"reward       {name}: 1 or more to the own answer of {len(full)} of {len(verdicts)} rows tried"
        below_full = [verdict for verdict in verdicts if verdict not in full]
        for verdict in below_full[:EXAMPLES]:
            result = f"{verdict.value:g}" if verdict.value is not None else f"no verdict: {verdict.detail}"
            yield f"             {verdict.row}: {result}, for {verdict.answer[:SHOWN]!r}"
        if len(below_full) > EXAMPLES:
            yield f"             and {len(below_full) - EXAMPLES} more"
