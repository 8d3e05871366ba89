"""The inputs of a run: model, tokenizer, prompts and rewards, loaded and checked before any work starts.

Functions raise ValueError with one sentence for what the user can fix.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ostinato.algo.algorithms import Algorithm
from ostinato.config import Recipe
from ostinato.config.fields import without_folders
from ostinato.config.sections import MemorySection, RolloutSection
from ostinato.config.tasks import VERIFIERS, OneTask, TaskSection
from ostinato.env.custom import SEEDS, EnvEpisode, new_factory, seeds
from ostinato.env.dialogue import ChatRenderer, Dialogue
from ostinato.env.mixture import Mixture, count_places, label_prompts
from ostinato.env.rows import with_columns
from ostinato.env.tasks import Rows, add_system_prompt, check_disjoint, check_params, load_tasks
from ostinato.env.tools import Tool, resolve_tools
from ostinato.launch.checks import check, check_columns, check_solvable, warn_of_control_tokens
from ostinato.launch.device_memory import Need, check_room, free_memory, step_need
from ostinato.launch.engine import shares
from ostinato.launch.graders import new_grader
from ostinato.launch.machine import device_of
from ostinato.launch.models import Unloaded, divides_transformers, facts_of, load_decoder
from ostinato.launch.trainer import check_teacher
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.named import model_folder
from ostinato.protocols import Engine, Env, Grader, Tasks
from ostinato.render import Renderer
from ostinato.reward.own_answers import spread, warnings_of
from ostinato.reward.workers import JUDGE, WorkerGrader
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.rollout import RolloutContext, close_env, start_env
from ostinato.run import MAIN_SET
from ostinato.types import Prompt, Sampling

log = logging.getLogger(__name__)
Tools = Mapping[str, Mapping[str, Tool]]  # by task, by their own name
TEMPLATE = 64  # tokens that a template adds to a prompt, about


class ClosingGrader(Grader, Protocol):
    """A grader with event counters, and with processes that ``close`` ends."""

    counters: Counter[str]

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The loaded inputs of a run or an evaluation; a context that ends its processes."""

    recipe: Recipe
    algorithm: Algorithm
    folder: Path  # of the base model
    decoder: Decoder
    renderer: Renderer
    grader: ClosingGrader
    train_prompts: Sequence[Prompt]  # empty for an evaluation
    eval_prompts: Sequence[Prompt]
    downstream: Mapping[str, Sequence[Prompt]]  # by name of the set
    agents: AgentTasks | None = None
    tools: Tools
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


def prepare(recipe: Recipe, *, training: bool, decoder: Any = None) -> RunInputs:
    """Load and check what the recipe names; the result is a context that ends the reward workers.
    ``decoder``: the model if it is loaded already."""
    algorithm = check(recipe)
    for name in recipe.task.by_name:
        check_solvable(recipe.judges(name))
    folder = model_folder(recipe.model.path)
    renderer = Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs)
    if training:
        check_teacher(recipe, algorithm, renderer)
    train, scored = read_sets(recipe, training)
    warn_of_control_tokens(renderer, [(row.where, row.messages) for row in (*train, *scored[MAIN_SET])])
    free = free_memory(device_of(recipe.model)) if training and not recipe.parallel.sharded else None
    if free is not None and recipe.model.backend == "native":
        check_room(recipe, read_config(folder), free)
    if decoder is None:
        decoder = (
            Unloaded(config=facts_of(recipe.model, folder))
            if training and divides_transformers(recipe)
            else load_decoder(recipe.model, folder, shared=training and shares(recipe))
        )
    tools, too_long = load_tools(recipe.task), set[int]()
    for name, rows in of_tasks([row for prompts in (train, *scored.values()) for row in prompts]).items():
        check_columns(recipe.judges(name), rows)
        too_long |= set(map(id, overlong(recipe, rows, renderer, decoder.config.max_positions, tools)))
        if (
            renderer.vocab_size > decoder.config.vocab_size
        ):  # rare: some rows may have tokens without embeddings
            for row in rows:
                check_tokens(renderer.prompt(row), row.where, renderer, decoder.config.vocab_size)
    train, *remaining = (_drop_overlong(too_long, rows) for rows in (train, *scored.values()))
    scored = dict(zip(scored, remaining, strict=True))
    counters = Counter[str]()
    judged = any(function.startswith(JUDGE) for function in recipe.reward.functions)
    judges = load("judge:")(recipe, decoder, folder, counters) if judged else {}
    grader = new_grader(recipe, judges, counters)
    try:
        warnings = try_rewards(grader, [train, *scored.values()], renderer)
        agents = _open_agents(recipe, renderer)
    except BaseException:
        grader.close()
        raise
    return RunInputs(
        recipe=recipe,
        algorithm=algorithm,
        folder=folder,
        decoder=decoder,
        renderer=renderer,
        grader=grader,
        train_prompts=train,
        eval_prompts=scored.pop(MAIN_SET),
        downstream=scored,
        agents=agents,
        tools=tools,
        num_overlong=len(too_long),
        left_open=grader.left_open,
        warnings=warnings,
    )


def read_sets(recipe: Recipe, training: bool) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """(prompts to train on, empty unless ``training``; prompts of each scored set by name, the main one
    first). Raises ValueError for what cannot be read, and for scored prompts that are trained on."""
    train = prompts(recipe, "train", None) if training else []
    held_out = prompts(recipe, recipe.eval.split, recipe.eval.n)
    if training and recipe.eval.split == "eval":
        fixed = {name for name, task in recipe.task.by_name.items() if task.source != SEEDS}
        # the text of "seeds" is the same in every game, so it is not compared
        check_disjoint(*([row for row in rows if row.task in fixed] for rows in (train, held_out)))
    return train, {MAIN_SET: held_out, **downstream_prompts(recipe, train)}


def downstream_prompts(recipe: Recipe, train: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each downstream set by name. Raises ValueError, with the name, for what cannot be read,
    and for a set of the training's own source that shares prompts with ``train``."""
    sets, tasks, seed = dict[str, list[Prompt]](), recipe.task.by_name, recipe.task.seed
    for name, section in recipe.eval.downstream.items():
        task_name = section.task or next(iter(tasks))
        n, system = section.n or None, tasks[task_name].system_prompt
        try:
            rows = load_tasks(section.source, section.split, seed, n, section.params, system)
            sets[name] = label_prompts(with_columns(rows, tasks[task_name].columns), task_name)
            if section.source in {task.source for task in tasks.values()}:
                check_disjoint(train, sets[name])
        except ValueError as error:
            raise ValueError(f"eval.downstream.{name}: {error}") from error
    return sets


def try_rewards(grader: WorkerGrader, sets: Iterable[Sequence[Prompt]], renderer: Renderer) -> list[str]:
    """Call every reward on a row of each task, and on own answers of rows; returns distinct warnings."""

    def encode(text: str) -> list[int]:
        return renderer.encode(text).tolist()

    tasks = [rows for prompts in sets for rows in of_tasks(prompts).values()]
    warnings = [warning for rows in tasks for warning in grader.check(rows[0], encode)]
    for rows in tasks:
        warnings += warnings_of(grader.own_verdicts(spread(rows), encode))
    return list({warning.partition("\n")[0]: warning for warning in warnings}.values())


def _open_agents(recipe: Recipe, renderer: Renderer) -> AgentTasks | None:
    """The server of agents' episodes; None for tasks without an agent."""
    if not any(task.has_agent for task in recipe.task.by_name.values()):
        return None
    try:
        return load("task.agent")(recipe, renderer)
    except ModuleNotFoundError as error:
        raise ValueError(f'agents need {error.name}; install it: pip install "ostinato[serve]"') from None


def prompts(recipe: Recipe, split: str, n: int | None) -> list[Prompt]:
    """``n`` prompts, divided over a mixture by its weights; if None, ``n_train`` of each task, all rows of a
    file where that is 0. Raises ValueError, with the name of a mixture's task."""
    section, prompts_of_tasks = recipe.task, list[Prompt]()
    sizes = {} if n is None else count_places(weights(recipe.task), section.seed, n)
    for name, task in section.by_name.items():
        try:
            rows = _rows(task, split, section.seed, sizes.get(name, task.n_train or None))
            prompts_of_tasks += label_prompts(with_columns(rows, task.columns), name)
        except ValueError as error:
            if not name:
                raise
            raise ValueError(f"task.mix {name!r}: {error}") from error
    return prompts_of_tasks


def weights(section: TaskSection) -> dict[str, float]:
    """The sampling weight of each task by name; {"": 1.0} without a mixture."""
    return {task.name: task.weight for task in section.mix} or {"": 1.0}


def _rows(task: OneTask, split: str, seed: int, n: int | None) -> list[Prompt]:
    """At most ``n`` prompts of one task: of a verifiers environment, a source, or seeds of an environment."""
    if task.agent.startswith(VERIFIERS):
        taskset = load(VERIFIERS)(task.agent, task.env_params)
        check_params(taskset.rows, task.params, task.agent, skip=("split", "n"))
        return taskset.rows(split, n, **task.params)
    if task.source != SEEDS:
        return load_tasks(task.source, split, seed, n, task.params, task.system_prompt)
    if n is None:
        raise ValueError(f"task.n_train is 0; task.source {SEEDS!r} is endless, say how many prompts to draw")
    factory = new_factory(task.env, task.env_params) if task.env else None
    rows = seeds(factory, task.env, split, seed, n)
    return [add_system_prompt(row, task.system_prompt) for row in rows] if task.system_prompt else rows


def new_tasks(inputs: RunInputs) -> Tasks:
    """The stream of prompts that the run trains on."""
    seed, by_task = inputs.recipe.task.seed, of_tasks(inputs.train_prompts)
    streams = {name: Rows(rows, seed=seed) for name, rows in by_task.items()}
    return streams[""] if "" in streams else Mixture(streams, weights(inputs.recipe.task), seed=seed)


def of_tasks(rows: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each task, in their order; all under "" without a mixture."""
    by_task: dict[str, list[Prompt]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    return by_task


def _drop_overlong(too_long: Set[int], rows: Sequence[Prompt]) -> list[Prompt]:
    """The rows that are not in ``too_long`` (by ``id``). Raises ValueError where none is left."""
    remaining = [row for row in rows if id(row) not in too_long]
    if rows and not remaining:
        raise ValueError(
            f"task.overlong is 'filter', and all {len(rows)} rows from {rows[0].where} on are too long; "
            "lower rollout.max_tokens, or take a model with a longer context"
        )
    return remaining


def overlong(
    recipe: Recipe,
    rows: Sequence[Prompt],
    renderer: Renderer,
    context: int,
    tools: Tools,
) -> list[Prompt]:
    """Rows of tasks with ``task.overlong = "filter"`` whose prompt, with ``tools``, leaves no room for an
    answer. A token is a byte or more, so only long prompts are rendered.

    Raises ValueError naming the first such row of a task that refuses them."""
    longest, keys = longest_answer(recipe.rollout, renderer)
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
    episode = environment(recipe, renderer, tools)

    def length_of(row: Prompt, tries: bool = False) -> int:
        try:
            return asyncio.run(_count_tokens(episode(row), row, tries))
        except Exception as error:
            task = recipe.task.by_name[row.task]
            if isinstance(error, ValueError) or not task.env:
                raise
            sentence = f"{type(error).__name__}: {error}"
            raise ValueError(f"task.env {task.env!r} on {row.where} raised {sentence}; fix it") from error

    sizes, too_long = [_bytes(row) for row in rows], list[Prompt]()
    # The longest prompt and the one of most messages bound what the template adds to any other.
    candidates = (int(np.argmax(counts)) for counts in (sizes, [len(row.messages or ()) for row in rows]))
    template_tokens = max(length_of(rows[index]) for index in {*candidates})
    for first in {row.task: row for row in reversed(rows)}.values():
        length_of(first, tries=True)
    for row, size in zip(rows, sizes, strict=True):
        if size + template_tokens <= room or (length := length_of(row)) <= room:
            continue
        if recipe.task.by_name[row.task].overlong == "refuse":
            raise ValueError(
                f"{row.where} has {length} tokens; with an answer of {longest} ({keys}) it exceeds the "
                f'context of {context}: shorten it, lower {keys}, or set task.overlong = "filter"'
            )
        too_long.append(row)
    return too_long


async def _count_tokens(env: Env, row: Prompt, tries: bool) -> int:
    """Number of tokens of the first context. With ``tries`` a user's own environment also takes one step."""
    try:
        length = len(await start_env(env))
        if tries and isinstance(env, EnvEpisode):
            warning = await env.try_step(str(row.columns.get("answer") or "I do not know."))
            if warning:
                log.warning(f"the environment of {row.where} {warning}")
        return length
    finally:
        await close_env(env)


def check_tokens(tokens: np.ndarray, where: str, renderer: Renderer, vocab_size: int) -> None:
    """Raises ValueError for a token without an embedding, which was added to the tokenizer alone."""
    if len(tokens) and (token := int(tokens.max())) >= vocab_size:
        raise ValueError(
            f"{where} has the token {renderer.decode([token], skip_special=False)!r} ({token}); the model "
            f"has embeddings for 0 to {vocab_size - 1}: leave it out, or save the model with "
            "resize_token_embeddings first"
        )


def longest_answer(section: RolloutSection, renderer: Renderer) -> tuple[int, str]:
    """(most tokens of the answer of a turn, the recipe keys that set it)."""
    interruption = new_interruption(section, renderer)
    if interruption is None:
        return section.max_tokens, "rollout.max_tokens"
    return interruption.max_tokens, "rollout.interrupt_after and rollout.answer_tokens"


def new_interruption(rollout: RolloutSection, renderer: Renderer) -> Interruption | None:
    """The interruption of thinking; None without rollout.interrupt_after. Raises ValueError for its
    phrase."""
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
    """Bytes that the template writes of this prompt alone."""
    if prompt.messages is None:
        return len((prompt.text or "").encode())
    return len(json.dumps([prompt.messages, prompt.tools], ensure_ascii=False, default=str).encode())


def rollout_need(inputs: RunInputs) -> Need:
    """KV cache need of a training step; assumes two bytes or more per token of a prompt."""
    recipe = inputs.recipe
    prompts = [*inputs.train_prompts, *inputs.eval_prompts]
    longest = max(map(_bytes, prompts), default=0) // 2 + TEMPLATE
    return step_need(recipe, longest_answer(recipe.rollout, inputs.renderer)[0], longest)


def new_stage(inputs: RunInputs, engine: Engine, grader: Grader) -> RolloutContext:
    """The rollout stage of a run with its ``engine`` and ``grader``."""
    recipe = inputs.recipe
    return RolloutContext(
        engine=engine,
        env=environment(recipe, inputs.renderer, inputs.tools, inputs.tool_counters, inputs.agents),
        grader=grader,
        sampling=sampling_of(recipe.rollout, inputs.renderer),
        context_limit=inputs.decoder.config.max_positions,
        interruption=new_interruption(recipe.rollout, inputs.renderer),
        identity=stage_identity(recipe),
        ends_in_thought=inputs.renderer.ends_in_thought,
    )


def sampling_of(rollout: RolloutSection, renderer: Renderer) -> Sampling:
    """Sampling parameters of the answers of training."""
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
    """Twelve hex digits over the parts of the recipe that decide which groups are played and how they are
    judged, apart from policy, sampling and seeds; independent of folders."""
    tree = without_folders(recipe.model_dump(mode="json"), Recipe)
    if not recipe.task.mix:
        del tree["task"]["mix"]  # absent in identities of older runs
    if not recipe.model.chat_template_kwargs:
        del tree["model"]["chat_template_kwargs"]
    if tree["model"]["backend"] != "transformers":
        del tree["model"]["backend"]  # absent there, too
    tasks = (tree["task"], *tree["task"].get("mix", ()))
    for task in tasks:
        if not task["columns"]:
            del task["columns"]
    memories = [task.pop("memory") for task in tasks]
    reward, weights, rollout = tree["reward"], tree["engine"]["weights"], tree["rollout"]
    keys = ("interrupt_after", "answer_tokens", "interrupt_phrase", "think_end")
    interruption = [rollout[key] for key in keys]
    played = [tree["model"], tree["task"], reward["functions"], reward["weights"], weights, interruption]
    played += [memories, tree["memory"]] if any(memories) else []
    if any(name.startswith(JUDGE) for name in reward["functions"]):  # with their revisions
        played.append("ring")  # of siblings; in identities of older runs it was a choice
    return hashlib.sha256(json.dumps(played, sort_keys=True).encode()).hexdigest()[:12]


def load_tools(tasks: TaskSection) -> Tools:
    """The tools by task, with MCP servers started. Raises ValueError for tools that cannot be loaded."""
    return {name: resolve_tools(task.tools) for name, task in tasks.by_name.items()}


def environment(
    recipe: Recipe,
    renderer: Renderer,
    tools: Tools,
    counters: Counter[str] | None = None,
    agents: AgentTasks | None = None,
) -> Callable[[Prompt], Env]:
    """A factory of a fresh episode per prompt: the user's own environment, an agent, or a conversation with
    the ``tools`` of its task. ``counters`` counts tool calls."""
    counters = Counter() if counters is None else counters
    factories = {
        name: _episodes(
            recipe.memory, task, renderer, tools[name], counters, agents if task.has_agent else None
        )
        for name, task in recipe.task.by_name.items()
    }
    return lambda prompt: factories[prompt.task](prompt)


def _episodes(
    memory: MemorySection,
    task: OneTask,
    renderer: Renderer,
    tools: Mapping[str, Tool],
    counters: Counter[str],
    agents: AgentTasks | None,
) -> Callable[[Prompt], Env]:
    """The factory of episodes of one task; ``agents`` is None for a task without an agent."""
    turns = task.max_turns
    new_memory = load("task.memory")(memory, renderer, counters) if task.memory else None
    if agents is not None:
        return agents.episodes(task, counters, new_memory)
    factory, opening = new_factory(task.env, task.env_params) if task.env else None, asyncio.Lock()

    def episode(prompt: Prompt) -> Env:
        words = new_memory().renderer(renderer) if new_memory else renderer
        if factory is not None:
            return EnvEpisode(prompt, words, factory, turns, counters=counters, opening=opening)
        return Dialogue(prompt, words, tools=tools, max_turns=turns, counters=counters)

    return episode


APPS = {
    "task.agent": "ostinato.apps.serve.agent_tasks:open_agents",
    "verifiers:": "ostinato.apps.serve.verifiers:VerifiersAgent",
    "task.memory": "ostinato.apps.memory.conversations:make_conversations",
    "judge:": "ostinato.apps.product.panel:open_panels",
    "judge revisions": "ostinato.apps.product.judges:pin_judges",
    "forecast": "ostinato.apps.scaling.forecast:new_forecaster",
}


class EpisodeMemory(Protocol):
    """Keeps the contexts of one episode within a budget."""

    def renderer(self, renderer: ChatRenderer) -> ChatRenderer: ...


class AgentTasks(Protocol):
    """Episodes that agents play through a server of this process."""

    def episodes(
        self, task: OneTask, counters: Counter[str], new_memory: Callable[[], EpisodeMemory] | None
    ) -> Callable[[Prompt], Env]: ...

    def close(self) -> None: ...


def load(name: str) -> Callable[..., Any]:
    """The function that ``APPS`` gives for ``name``. Raises ModuleNotFoundError where a package that it needs
    is not installed."""
    module, _, function = APPS[name].partition(":")
    return getattr(import_module(module), function)
