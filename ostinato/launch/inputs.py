"""What a run reads: model, tokenizer, prompts and rewards, loaded and checked before any work starts.

Raises ValueError with one sentence for what the user can fix.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ostinato.config import Recipe
from ostinato.config.paths import without_folders
from ostinato.config.tasks import VERIFIERS, OneTask
from ostinato.env.custom import SEEDS, EnvEpisode, new_factory, seeds
from ostinato.env.dialogue import Dialogue
from ostinato.env.mixture import Mixture, counts, label_prompts
from ostinato.env.rows import with_columns
from ostinato.env.tasks import Rows, add_system_prompt, check_disjoint, check_params, load_tasks
from ostinato.env.tools import resolve_tools
from ostinato.launch.apps import AgentTasks, load
from ostinato.launch.checks import check, check_columns, check_solvable, warn_of_control_tokens
from ostinato.launch.device_memory import Need, check_room, free_memory, step_need
from ostinato.launch.engine import shares
from ostinato.launch.evaluations import downstream_prompts
from ostinato.launch.graders import new_grader
from ostinato.launch.models import device_of, load_decoder
from ostinato.launch.teacher import check_teacher
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.named import model_folder
from ostinato.protocols import Engine, Env, Grader, Tasks
from ostinato.render import Renderer
from ostinato.reward.own_answers import spread, warnings_of
from ostinato.reward.workers import JUDGE
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.rollout import RolloutContext, close_env, first_context
from ostinato.types import Prompt, Sampling

log = logging.getLogger(__name__)
TEMPLATE = 64  # tokens that a template adds to a prompt, about


class ClosingGrader(Grader, Protocol):
    """One that counts what it meets, and has processes to end."""

    counters: Counter[str]

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What a run or an evaluation is played with."""

    recipe: Recipe
    folder: Path  # of the base model
    decoder: Decoder
    renderer: Renderer
    grader: ClosingGrader
    train_prompts: Sequence[Prompt]  # empty for an evaluation
    eval_prompts: Sequence[Prompt]
    downstream: Mapping[str, Sequence[Prompt]]  # by name of the set
    agents: AgentTasks | None = None
    tool_counters: Counter[str] = dataclasses.field(default_factory=Counter)
    num_overlong: int = 0  # rows that are left out (task.overlong)
    left_open: Sequence[str] = ()  # what reward.isolation cannot prevent on this machine, in words
    warnings: Sequence[str] = ()  # of the dry run of rewards; a sentence, and lines under it

    def __enter__(self) -> RunInputs:
        return self

    def __exit__(self, *exception: object) -> None:
        self.grader.close()
        if self.agents is not None:
            self.agents.close()


def prepare(recipe: Recipe, *, training: bool) -> RunInputs:
    """Load what the recipe names and find what is wrong with it. A context: it ends the reward workers."""
    algorithm = check(recipe)
    for name in recipe.task.by_name:
        check_solvable(recipe.judges(name))
    folder = model_folder(recipe.model.path)
    renderer = Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs)
    if training:
        check_teacher(recipe, algorithm, renderer)
    train_prompts = prompts(recipe, "train", None) if training else []
    eval_prompts = prompts(recipe, recipe.eval.split, recipe.eval.n)
    if training and recipe.eval.split == "eval":
        check_disjoint(*(_fixed(recipe, rows) for rows in (train_prompts, eval_prompts)))
    downstream = downstream_prompts(recipe, train_prompts)
    scored = [*eval_prompts, *(prompt for each in downstream.values() for prompt in each)]
    warn_of_control_tokens(renderer, [(row.where, row.messages) for row in (*train_prompts, *eval_prompts)])
    free = free_memory(device_of(recipe.model)) if training and not recipe.parallel.sharded else None
    if free is not None and recipe.model.backend == "native":
        check_room(recipe, read_config(folder), free)
    decoder = load_decoder(recipe.model, folder, shared=training and shares(recipe))
    too_long = set[int]()
    for name, rows in of_tasks([*train_prompts, *scored]).items():
        check_columns(recipe.judges(name), rows)
        too_long |= set(map(id, overlong(recipe, rows, renderer, decoder.config.max_positions)))
        if renderer.vocab_size > decoder.config.vocab_size:  # in which few rows, if any, take part
            for row in rows:
                check_tokens(renderer.prompt(row), row.where, renderer, decoder.config.vocab_size)
    train_prompts, eval_prompts = (_without(too_long, rows) for rows in (train_prompts, eval_prompts))
    downstream = {name: _without(too_long, rows) for name, rows in downstream.items()}
    counters = Counter[str]()
    judged = any(function.startswith(JUDGE) for function in recipe.reward.functions)
    judges = load("judge:")(recipe, decoder, folder, counters) if judged else {}
    grader = new_grader(recipe, judges, counters)

    def encode(text: str) -> list[int]:
        return renderer.encode(text).tolist()

    try:
        sets = [train_prompts, eval_prompts, *downstream.values()]
        each_task = [rows for each in sets for rows in of_tasks(each).values()]
        found = [warning for rows in each_task for warning in grader.check(rows[0], encode)]
        for rows in each_task:
            found += warnings_of(grader.own_verdicts(spread(rows), encode))
    except BaseException:
        grader.close()
        raise
    return RunInputs(
        recipe=recipe,
        agents=_agents(recipe, renderer),
        folder=folder,
        decoder=decoder,
        renderer=renderer,
        grader=grader,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        downstream=downstream,
        num_overlong=len(too_long),
        left_open=grader.left_open,
        warnings=list({warning.partition("\n")[0]: warning for warning in found}.values()),
    )


def _agents(recipe: Recipe, renderer: Renderer) -> AgentTasks | None:
    if not any(task.has_agent for task in recipe.task.by_name.values()):
        return None
    try:
        open_agents = load("task.agent")
    except ModuleNotFoundError as error:
        raise ValueError(f'agents need {error.name}; install it: pip install "ostinato[serve]"') from None
    return open_agents(recipe, renderer)


def prompts(recipe: Recipe, split: str, n: int | None) -> list[Prompt]:
    """``n`` prompts, of a mixture by its weights; None: ``n_train`` of each task, all rows of a file where
    that is 0. Raises ValueError, for a task of a mixture with its name."""
    section, found = recipe.task, list[Prompt]()
    sizes = {} if n is None else counts(weights(recipe), section.seed, n)
    for name, task in section.by_name.items():
        try:
            rows = _prompts(task, split, section.seed, sizes.get(name, task.n_train or None))
            found += label_prompts(rows, name)
        except ValueError as error:
            if not name:
                raise
            raise ValueError(f"task.mix {name!r}: {error}") from error
    return found


def weights(recipe: Recipe) -> dict[str, float]:
    """Of the tasks by name."""
    return {one.name: one.weight for one in recipe.task.mix} or {"": 1.0}


def _prompts(task: OneTask, split: str, seed: int, n: int | None) -> list[Prompt]:
    return with_columns(_rows(task, split, seed, n), task.columns)


def _rows(task: OneTask, split: str, seed: int, n: int | None) -> list[Prompt]:
    if task.agent.startswith(VERIFIERS):
        taskset = load(VERIFIERS)(task.agent, task.env_params)
        check_params(taskset.rows, task.params, task.agent, skip=("split", "n"))
        return taskset.rows(split, n, **task.params)
    if task.source != SEEDS:
        return load_tasks(task.source, split, seed, n, task.params, task.system_prompt)
    if n is None:
        raise ValueError(f"task.n_train is 0; task.source {SEEDS!r} is endless, say how many prompts to draw")
    make = new_factory(task.env, task.env_params) if task.env else None
    rows = seeds(make, task.env, split, seed, n)
    return [add_system_prompt(row, task.system_prompt) for row in rows] if task.system_prompt else rows


def _fixed(recipe: Recipe, rows: Sequence[Prompt]) -> list[Prompt]:
    """Without those of "seeds", whose text is the same in every game."""
    return [row for row in rows if recipe.task.by_name[row.task].source != SEEDS]


def new_tasks(prepared: RunInputs) -> Tasks:
    """The stream of prompts that the run trains on."""
    seed, by_task = prepared.recipe.task.seed, of_tasks(prepared.train_prompts)
    streams = {name: Rows(rows, seed=seed) for name, rows in by_task.items()}
    return streams[""] if "" in streams else Mixture(streams, weights(prepared.recipe), seed=seed)


def of_tasks(rows: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each task, in their order; all under "" without a mixture."""
    found: dict[str, list[Prompt]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    return found


def _without(too_long: Set[int], rows: Sequence[Prompt]) -> list[Prompt]:
    """Raises ValueError where none is left."""
    left = [row for row in rows if id(row) not in too_long]
    if rows and not left:
        raise ValueError(
            f"task.overlong is 'filter', and all {len(rows)} rows from {rows[0].where} on are too long; "
            "lower rollout.max_tokens, or take a model with a longer context"
        )
    return left


def overlong(recipe: Recipe, rows: Sequence[Prompt], renderer: Renderer, context: int) -> list[Prompt]:
    """Rows of tasks with ``task.overlong = "filter"`` whose prompt leaves no room for an answer. A token is a
    byte or more, so only long prompts are rendered.

    Raises ValueError naming the first of another task."""
    longest, keys = longest_answer(recipe, renderer)
    room = context - longest
    if room < 1:
        raise ValueError(
            f"an answer has up to {longest} tokens ({keys}), but the context of {recipe.model.path} "
            f"is {context} tokens; lower {keys}, so that a prompt fits in front"
        )
    if recipe.memory.budget > room and any(task.memory for task in recipe.task.by_name.values()):
        raise ValueError(
            f"memory.budget is {recipe.memory.budget}; with an answer of {longest} ({keys}) it exceeds the "
            f"context of {context}: lower one of them"
        )
    episode = environment(recipe, renderer)

    def length_of(row: Prompt, tries: bool = False) -> int:
        try:
            return asyncio.run(_tokens_of(episode(row), row, tries))
        except Exception as error:
            task = recipe.task.by_name[row.task]
            if isinstance(error, ValueError) or not task.env:
                raise
            sentence = f"{type(error).__name__}: {error}"
            raise ValueError(f"task.env {task.env!r} on {row.where} raised {sentence}; fix it") from error

    sizes, too_long = [_bytes(row) for row in rows], list[Prompt]()
    # The longest prompt and the one of most messages bound what the template adds to any other.
    longest_of = (int(np.argmax(counts)) for counts in (sizes, [len(row.messages or ()) for row in rows]))
    added = max(length_of(rows[at]) for at in {*longest_of})
    for first in {row.task: row for row in reversed(rows)}.values():
        length_of(first, tries=True)
    for row, size in zip(rows, sizes, strict=True):
        if size + added <= room or (length := length_of(row)) <= room:
            continue
        if recipe.task.by_name[row.task].overlong == "refuse":
            raise ValueError(
                f"{row.where} has {length} tokens; with an answer of {longest} ({keys}) it exceeds the "
                f'context of {context}: shorten it, lower {keys}, or set task.overlong = "filter"'
            )
        too_long.append(row)
    return too_long


async def _tokens_of(env: Env, row: Prompt, tries: bool) -> int:
    """Of its first context. With ``tries`` an environment of one's own is given an answer, too."""
    try:
        length = len(await first_context(env))
        if tries and isinstance(env, EnvEpisode):
            warning = await env.try_step(str(row.columns.get("answer") or "I do not know."))
            if warning:
                log.warning(f"the environment of {row.where} {warning}")
        return length
    finally:
        await close_env(env)


def check_tokens(tokens: np.ndarray, where: str, renderer: Renderer, vocab_size: int) -> None:
    """Every token has an embedding. A tokenizer can have more: tokens that were added to it alone."""
    if len(tokens) and (token := int(tokens.max())) >= vocab_size:
        raise ValueError(
            f"{where} has the token {renderer.decode([token], skip_special=False)!r} ({token}); the model "
            f"has embeddings for 0 to {vocab_size - 1}: leave it out, or save the model with "
            "resize_token_embeddings first"
        )


def longest_answer(recipe: Recipe, renderer: Renderer) -> tuple[int, str]:
    """(tokens of the longest answer of a turn, the keys that say so)."""
    interruption = new_interruption(recipe, renderer)
    if interruption is None:
        return recipe.rollout.max_tokens, "rollout.max_tokens"
    return interruption.most_tokens, "rollout.interrupt_after and rollout.answer_tokens"


def new_interruption(recipe: Recipe, renderer: Renderer) -> Interruption | None:
    """When thinking is interrupted; None where it never is (no rollout.interrupt_after)."""
    rollout = recipe.rollout
    if not rollout.interrupt_after:
        return None
    phrase = renderer.encode(rollout.interrupt_phrase)
    if ends := np.intersect1d(phrase, renderer.stop_tokens).tolist():
        raise ValueError(
            f"rollout.interrupt_phrase has {renderer.decode(ends[:1], skip_special=False)!r}, which ends an "
            "answer; leave it out"
        )
    shortest, longest = rollout.interrupt_after
    return Interruption(
        shortest=shortest,
        longest=longest,
        answer_tokens=rollout.answer_tokens,
        phrase=phrase,
        think_end=rollout.think_end,
        words=renderer,
    )


def _bytes(prompt: Prompt) -> int:
    """Of what the template writes of this prompt alone."""
    if prompt.messages is None:
        return len((prompt.text or "").encode())
    return len(json.dumps([prompt.messages, prompt.tools], ensure_ascii=False, default=str).encode())


def rollout_need(prepared: RunInputs) -> Need:
    """What a step of training samples at once. A token of a prompt is taken for two bytes or more."""
    recipe = prepared.recipe
    prompts = [*prepared.train_prompts, *prepared.eval_prompts]
    longest = max(map(_bytes, prompts), default=0) // 2 + TEMPLATE
    return step_need(recipe, longest_answer(recipe, prepared.renderer)[0], longest)


def new_stage(prepared: RunInputs, engine: Engine, grader: Grader) -> RolloutContext:
    recipe = prepared.recipe
    return RolloutContext(
        engine=engine,
        env=environment(recipe, prepared.renderer, prepared.tool_counters, prepared.agents),
        grader=grader,
        sampling=sampling_of(recipe, prepared.renderer),
        context_limit=prepared.decoder.config.max_positions,
        interruption=new_interruption(recipe, prepared.renderer),
        identity=stage_identity(recipe),
        ends_in_thought=prepared.renderer.ends_in_thought,
    )


def sampling_of(recipe: Recipe, renderer: Renderer) -> Sampling:
    """How the answers of training are drawn."""
    rollout = recipe.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop_tokens=renderer.stop_tokens,
        stop_strings=rollout.stop,
    )


def stage_identity(recipe: Recipe) -> str:
    """Twelve hex digits of everything in the recipe that decides which groups are played, and how they are
    judged, beside the policy, the sampling and the seeds; the same in any folder."""
    tree = without_folders(recipe.model_dump(mode="json"), Recipe)
    if not recipe.task.mix:
        del tree["task"]["mix"]  # groups of older runs are found
    if not recipe.model.chat_template_kwargs:
        del tree["model"]["chat_template_kwargs"]
    if tree["model"]["backend"] != "transformers":
        del tree["model"]["backend"]  # the same
    tasks = (tree["task"], *tree["task"].get("mix", ()))
    for one in tasks:
        if not one["columns"]:
            del one["columns"]
    kept = [one.pop("memory") for one in tasks]
    reward, weights, rollout = tree["reward"], tree["engine"]["weights"], tree["rollout"]
    keys = ("interrupt_after", "answer_tokens", "interrupt_phrase", "think_end")
    interruption = [rollout[key] for key in keys]
    played = [tree["model"], tree["task"], reward["functions"], reward["weights"], weights, interruption]
    played += [kept, tree["memory"]] if any(kept) else []
    if any(name.startswith(JUDGE) for name in reward["functions"]):  # with their revisions
        played.append(reward["judge_pairs"])
    return hashlib.sha256(json.dumps(played, sort_keys=True).encode()).hexdigest()[:12]


def environment(
    recipe: Recipe,
    renderer: Renderer,
    counters: Counter[str] | None = None,
    agents: AgentTasks | None = None,
) -> Callable[[Prompt], Env]:
    """A fresh episode per prompt: of an environment of one's own, one turn, or a conversation with tools,
    whose calls ``counters`` counts."""
    counters = Counter() if counters is None else counters
    made = {
        name: _episodes(recipe, task, renderer, counters, agents if task.has_agent else None)
        for name, task in recipe.task.by_name.items()
    }
    return lambda prompt: made[prompt.task](prompt)


def _episodes(
    recipe: Recipe, task: OneTask, renderer: Renderer, counters: Counter[str], agents: AgentTasks | None
) -> Callable[[Prompt], Env]:
    tools, turns = resolve_tools(task.tools), task.max_turns
    new_memory = load("task.memory")(recipe.memory, renderer, counters) if task.memory else None
    if agents is not None:
        return agents.episodes(task, counters, new_memory)
    make, opening = new_factory(task.env, task.env_params) if task.env else None, asyncio.Lock()

    def episode(prompt: Prompt) -> Env:
        words = new_memory().renderer(renderer) if new_memory else renderer
        if make is not None:
            return EnvEpisode(prompt, words, make, turns, counters=counters, opening=opening)
        return Dialogue(prompt, words, tools=tools, max_turns=turns, counters=counters)

    return episode
