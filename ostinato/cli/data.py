"""``ostinato data``: what a recipe or a file of rows comes to, before anything is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ostinato.config import Recipe
from ostinato.launch.graders import new_grader
from ostinato.launch.inputs import environment, load_tools, longest_answer, of_tasks, overlong, prompts
from ostinato.launch.models import facts_of, recipe_of
from ostinato.model.named import model_folder
from ostinato.protocols import Env
from ostinato.render import Renderer
from ostinato.reward.own_answers import FULL, SHOWN, OwnVerdict, spread
from ostinato.reward.workers import JUDGE
from ostinato.rollout.rollout import close_env, first_context
from ostinato.terminal import say, waiting
from ostinato.types import Prompt

MEASURED = 10_000  # prompts that are tokenised for the table of lengths
EXAMPLES = 2  # of answers that a reward does not pay
FILES = (".jsonl", ".ndjson", ".parquet")
# Built-in rewards that are tried on the answers of a file.
COMPARED = ("numeric", "math_verify", "code_tests", "exact")


def data(target: str, overrides: Sequence[str], *, model: str, row: int) -> None:
    """Print what ``target``, a recipe or a file of rows, gives to the policy: how many prompts, how long,
    prompt number ``row`` as the model reads it, and what each reward gives to the rows' own answers."""
    is_file = target.endswith(FILES)
    if is_file:
        named = [f"task.source={target}", "task.n_train=0", *([f"model.path={model}"] if model else [])]
        recipe = Recipe.load({}, *named, *overrides)
    else:
        recipe = recipe_of(target, *([f"model.path={model}"] if model else []), *overrides)[0]
    folder = model_folder(recipe.model.path)
    renderer, context = (
        Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs),
        facts_of(recipe.model, folder).max_positions,
    )
    rows, tools = prompts(recipe, "train", None), load_tools(recipe.task)
    held_out = _held_out(recipe)
    too_long = {  # without a hold-out a row is in both sets
        each.where
        for of_task in of_tasks([*rows, *held_out]).values()
        for each in overlong(_filtering(recipe), of_task, renderer, context, tools)
    }
    if not 1 <= row <= len(rows):
        raise ValueError(f"--row is {row}; there are rows 1 to {len(rows)}")
    say(*_counts(recipe, rows, held_out, len(too_long)))
    episode = environment(recipe, renderer, tools)
    say(_lengths(recipe, rows, episode, renderer, context), *_prompt(rows[row - 1], episode, renderer))
    functions = list(COMPARED) if is_file and not any("reward." in text for text in overrides) else None
    with waiting("calling the rewards on the rows' own answers"):
        for of_task in of_tasks(rows).values():
            for function in functions or recipe.reward.functions:
                if not function.startswith(JUDGE):
                    say(*_verdicts(recipe, of_task, function))


def _held_out(recipe: Recipe) -> list[Prompt]:
    """Without a hold-out, a file has no rows to evaluate on."""
    try:
        return prompts(recipe, recipe.eval.split, None)
    except ValueError:
        return []


def _filtering(recipe: Recipe) -> Recipe:
    """Rows that are too long are counted here, whatever a run does with them."""
    task = recipe.task.model_copy(update={"overlong": "filter"})
    mix = tuple(each.model_copy(update={"overlong": "filter"}) for each in task.mix)
    return recipe.model_copy(update={"task": task.model_copy(update={"mix": mix})})


def _counts(
    recipe: Recipe, rows: Sequence[Prompt], held_out: Sequence[Prompt], too_long: int
) -> Iterator[str]:
    sources = ", ".join(task.rows_from for task in recipe.task.by_name.values())
    columns = ", ".join(dict.fromkeys(name for each in rows[:100] for name in each.columns))
    asked = {(each.text, str(each.messages)) for each in rows}
    twice = f", {len(rows) - len(asked)} ask what another asks" if len(asked) < len(rows) else ""
    yield f"rows         {sources}: {len(rows)} to train on{twice}; columns for rewards: {columns or 'none'}"
    if held_out and {each.uid for each in held_out} & {each.uid for each in rows}:
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
    chosen = [rows[k] for k in np.linspace(0, len(rows) - 1, min(len(rows), MEASURED)).astype(int).tolist()]

    async def measure() -> list[int]:
        lengths = []
        for each in chosen:
            env = episode(each)
            lengths.append(len(await first_context(env)))
            await close_env(env)
        return lengths

    lengths = sorted(asyncio.run(measure()))
    of = "" if len(chosen) == len(rows) else f" of {len(chosen)} of them"
    longest, keys = longest_answer(recipe.rollout, renderer)
    median = lengths[len(lengths) // 2]
    return (
        f"length       prompts{of} have {lengths[0]} to {lengths[-1]} tokens (median {median}); "
        f"an answer up to {longest} ({keys}); the context of {recipe.model.path} is {context}"
    )


def _prompt(row: Prompt, episode: Callable[[Prompt], Env], renderer: Renderer) -> Iterator[str]:
    tokens = asyncio.run(first_context(episode(row)))
    yield f"prompt       {row.where}, {len(tokens)} tokens, as the model reads it:"
    yield from ("  " + line for line in renderer.decode(tokens, skip_special=False).split("\n"))
    yield f"tokens       {tokens.tolist()}"
    if (answer := row.columns.get("answer")) is not None:
        yield f"answer       {str(answer)[:SHOWN]!r}"


def own_verdicts(
    recipe: Recipe, rows: Sequence[Prompt], function: str
) -> Iterator[tuple[str, list[OwnVerdict]]]:
    """(name, verdicts): what a reward gives to the own answers of some ``rows``, which are of one task."""
    reward = recipe.reward.model_copy(update={"functions": (function,), "weights": ()})
    task = recipe.task.model_copy(update={"mix": ()})
    grader = new_grader(recipe.model_copy(update={"reward": reward, "task": task}))
    try:
        for _, name, verdicts in grader.own_verdicts(spread(rows), lambda text: list(text.encode())):
            yield name, verdicts
    finally:
        grader.close()


def _verdicts(recipe: Recipe, rows: Sequence[Prompt], function: str) -> Iterator[str]:
    try:
        judged = list(own_verdicts(recipe, rows, function))
    except ValueError as error:
        yield f"reward       {function}: {error}"
        return
    for name, verdicts in judged:
        full = [each for each in verdicts if each.value is not None and each.value >= FULL]
        if not verdicts:
            yield f"reward       {name}: the rows have no own answer that it could judge"
            continue
        yield f"reward       {name}: 1 or more to the own answer of {len(full)} of {len(verdicts)} rows tried"
        others = [each for each in verdicts if each not in full]
        for each in others[:EXAMPLES]:
            what = f"{each.value:g}" if each.value is not None else f"no verdict: {each.detail}"
            yield f"             {each.row}: {what}, for {each.answer[:SHOWN]!r}"
        if len(others) > EXAMPLES:
            yield f"             and {len(others) - EXAMPLES} more"
