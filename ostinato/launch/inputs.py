"""The inputs of a run: model, tokenizer, prompts and rewards, loaded and checked before any work starts.

Functions raise ValueError, with one sentence, for mistakes that the user can correct.
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
from ostinato.env.custom import SEEDS, EnvEpisode, make_factory, make_seed_prompts
from ostinato.env.dialogue import ChatRenderer, Dialogue
from ostinato.env.mixture import Mixture, count_places, label_prompts
from ostinato.env.rows import add_columns
from ostinato.env.tasks import Rows, add_system_prompt, check_disjoint, check_params, load_tasks
from ostinato.env.tools import Tool, resolve_tools
from ostinato.launch.checks import check_columns, check_recipe, check_solvable, warn_of_control_tokens
from ostinato.launch.device_memory import Need, check_room, compute_step_need, measure_free_memory
from ostinato.launch.engine import shares_base
from ostinato.launch.graders import new_grader
from ostinato.launch.machine import choose_device
from ostinato.launch.models import Unloaded, divides_transformers, load_decoder, read_facts
from ostinato.launch.trainer import check_teacher
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.named import find_model_folder
from ostinato.protocols import Engine, Env, Grader, Tasks
from ostinato.render import Renderer
from ostinato.reward.own_answers import make_warnings, spread_prompts
from ostinato.reward.workers import JUDGE, WorkerGrader
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.rollout import RolloutContext, close_env, start_env
from ostinato.run import MAIN_SET
from ostinato.types import Prompt, Sampling

log = logging.getLogger(__name__)
Tools = Mapping[str, Mapping[str, Tool]]  # by task, by their own name
TEMPLATE_TOKENS = 64  # that a template adds to a prompt, by assumption


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
    isolation_gaps: Sequence[str] = ()  # what reward.isolation cannot prevent on this machine, in words
    warnings: Sequence[str] = ()  # of the dry run of rewards; a sentence, and lines under it

    def __enter__(self) -> RunInputs:
        return self

    def __exit__(self, *exception: object) -> None:
        self.grader.close()
        if self.agents is not None:
            self.agents.close()


def prepare_inputs(recipe: Recipe, *, training: bool, base: Any = None) -> RunInputs:
    """Load and check what the recipe names: model, prompts, tools, rewards, agents. Starts MCP servers,
    the processes of the grader, and the server of agents. Calls every reward once and takes one step in each
    task's own environment, to try them. The result is a context that ends the grader and the agents' server.

    ``training``: also load the prompts to train on, check the teacher and the GPU's memory (RunFailed), and
    let workers of a cluster share the model. ``base``: the model if it is loaded already."""
    algorithm = check_recipe(recipe)
    for name in recipe.task.by_name:
        check_solvable(recipe.judges(name))
    folder = find_model_folder(recipe.model.path)
    renderer = Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs)
    if training:
        check_teacher(recipe, algorithm, renderer)
    train, scored = read_sets(recipe, training)
    warn_of_control_tokens(renderer, [(row.where, row.messages) for row in (*train, *scored[MAIN_SET])])
    free = (
        measure_free_memory(choose_device(recipe.model)) if training and not recipe.parallel.sharded else None
    )
    if free is not None and recipe.model.backend == "native":
        check_room(recipe, read_config(folder), free)
    decoder = _load_base(recipe, folder, training) if base is None else base
    tools, too_long = load_tools(recipe.task), set[int]()
    for name, rows in group_by_task(
        [row for prompts in (train, *scored.values()) for row in prompts]
    ).items():
        check_columns(recipe.judges(name), rows)
        too_long |= set(map(id, find_overlong(recipe, rows, renderer, decoder.config.max_positions, tools)))
        if renderer.vocab_size > decoder.config.vocab_size:  # rows may have tokens without embeddings
            for row in rows:
                check_tokens(renderer.prompt(row), row.where, renderer, decoder.config.vocab_size)
    train, *remaining = (_drop_overlong(too_long, rows) for rows in (train, *scored.values()))
    scored = dict(zip(scored, remaining, strict=True))
    counters = Counter[str]()
    has_judges = any(function.startswith(JUDGE) for function in recipe.reward.functions)
    judges = load_app("judge:")(recipe, decoder, folder, counters) if has_judges else {}
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
        isolation_gaps=grader.left_open,
        warnings=warnings,
    )


def _load_base(recipe: Recipe, folder: Path, training: bool) -> Any:
    """Load the model, which workers of a cluster share where they can. A run whose ranks will each load a
    part of it gets ``Unloaded``."""
    if training and divides_transformers(recipe):
        return Unloaded(config=read_facts(recipe.model, folder))
    return load_decoder(recipe.model, folder, shared=training and shares_base(recipe))


def read_sets(recipe: Recipe, training: bool) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Return (prompts to train on, empty unless ``training``; prompts of each scored set by name, the main
    one first). Raises ValueError for sources that cannot be read, and for held-out prompts that are also
    trained on, if eval.split is "eval"."""
    train = read_prompts(recipe, "train", None) if training else []
    held_out = read_prompts(recipe, recipe.eval.split, recipe.eval.n)
    if training and recipe.eval.split == "eval":
        # the text of "seeds" is the same in every game, so it is not compared
        compared_tasks = {name for name, task in recipe.task.by_name.items() if task.source != SEEDS}
        check_disjoint(*([row for row in rows if row.task in compared_tasks] for rows in (train, held_out)))
    return train, {MAIN_SET: held_out, **read_downstream_prompts(recipe, train)}


def read_downstream_prompts(recipe: Recipe, train: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Read the prompts of each downstream set by name. Raises ValueError, with the name, for a set that
    cannot be read, and for a set of the training's own source that shares prompts with ``train``."""
    sets, tasks, seed = dict[str, list[Prompt]](), recipe.task.by_name, recipe.task.seed
    for name, section in recipe.eval.downstream.items():
        task_name = section.task or next(iter(tasks))
        n, system = section.n or None, tasks[task_name].system_prompt
        try:
            rows = load_tasks(section.source, section.split, seed, n, section.params, system)
            sets[name] = label_prompts(add_columns(rows, tasks[task_name].columns), task_name)
            if section.source in {task.source for task in tasks.values()}:
                check_disjoint(train, sets[name])
        except ValueError as error:
            raise ValueError(f"eval.downstream.{name}: {error}") from error
    return sets


def try_rewards(grader: WorkerGrader, sets: Iterable[Sequence[Prompt]], renderer: Renderer) -> list[str]:
    """Call every reward on the first row of each task, and on the rows' own answers; returns the warnings,
    one of each first line. This starts the grader's processes. Raises ValueError for a reward that fails."""

    def encode(text: str) -> list[int]:
        return renderer.encode(text).tolist()

    tasks = [rows for prompts in sets for rows in group_by_task(prompts).values()]
    warnings = [warning for rows in tasks for warning in grader.check(rows[0], encode)]
    for rows in tasks:
        warnings += make_warnings(grader.iterate_own_verdicts(spread_prompts(rows), encode))
    return list({warning.partition("\n")[0]: warning for warning in warnings}.values())


def _open_agents(recipe: Recipe, renderer: Renderer) -> AgentTasks | None:
    """Start the server of agents' episodes; None for tasks without an agent. Raises ValueError if a package
    that it needs is not installed."""
    if not any(task.has_agent for task in recipe.task.by_name.values()):
        return None
    try:
        return load_app("task.agent")(recipe, renderer)
    except ModuleNotFoundError as error:
        raise ValueError(f'agents need {error.name}; install it: pip install "ostinato[serve]"') from None


def read_prompts(recipe: Recipe, split: str, n: int | None) -> list[Prompt]:
    """Read ``n`` prompts, divided over a mixture by its weights. If ``n`` is None, read ``n_train`` of each
    task; if that is 0, all rows of its file. Raises ValueError, in a mixture with the task's name, for a
    source that cannot be read."""
    section, prompts_of_tasks = recipe.task, list[Prompt]()
    sizes = {} if n is None else count_places(list_task_weights(recipe.task), section.seed, n)
    for name, task in section.by_name.items():
        try:
            rows = _read_rows(task, split, section.seed, sizes.get(name, task.n_train or None))
            prompts_of_tasks += label_prompts(add_columns(rows, task.columns), name)
        except ValueError as error:
            if not name:
                raise
            raise ValueError(f"task.mix {name!r}: {error}") from error
    return prompts_of_tasks


def list_task_weights(section: TaskSection) -> dict[str, float]:
    """List the sampling weight of each task by name; {"": 1.0} without a mixture."""
    return {task.name: task.weight for task in section.mix} or {"": 1.0}


def _read_rows(task: OneTask, split: str, seed: int, n: int | None) -> list[Prompt]:
    """Read at most ``n`` prompts of one task, all if None: of a verifiers environment, a source, or seeds of
    an environment. Raises ValueError if all seeds are asked for, and for parameters that the rows do not
    take."""
    if task.agent.startswith(VERIFIERS):
        taskset = load_app(VERIFIERS)(task.agent, task.env_params)
        check_params(taskset.rows, task.params, task.agent, skip=("split", "n"))
        return taskset.rows(split, n, **task.params)
    if task.source != SEEDS:
        return load_tasks(task.source, split, seed, n, task.params, task.system_prompt)
    if n is None:
        raise ValueError(f"task.n_train is 0; task.source {SEEDS!r} is endless, say how many prompts to draw")
    factory = make_factory(task.env, task.env_params) if task.env else None
    rows = make_seed_prompts(factory, task.env, split, seed, n)
    return [add_system_prompt(row, task.system_prompt) for row in rows] if task.system_prompt else rows


def new_tasks(inputs: RunInputs) -> Tasks:
    """Make the stream of prompts that the run trains on."""
    seed, by_task = inputs.recipe.task.seed, group_by_task(inputs.train_prompts)
    streams = {name: Rows(rows, seed=seed) for name, rows in by_task.items()}
    return (
        streams[""] if "" in streams else Mixture(streams, list_task_weights(inputs.recipe.task), seed=seed)
    )


def group_by_task(rows: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Group the prompts by their task, in their order; all under "" without a mixture."""
    by_task: dict[str, list[Prompt]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    return by_task


def _drop_overlong(too_long: Set[int], rows: Sequence[Prompt]) -> list[Prompt]:
    """Return the rows that are not in ``too_long`` (by ``id``). Raises ValueError if none is left of
    several."""
    remaining = [row for row in rows if id(row) not in too_long]
    if rows and not remaining:
        raise ValueError(
            f"task.overlong is 'filter', and all {len(rows)} rows from {rows[0].where} on are too long; "
            "lower rollout.max_tokens, or take a model with a longer context"
        )
    return remaining


def find_overlong(
    recipe: Recipe,
    rows: Sequence[Prompt],
    renderer: Renderer,
    context: int,
    tools: Tools,
) -> list[Prompt]:
    """Find the rows of tasks with ``task.overlong = "filter"`` whose prompt, with ``tools``, leaves no room
    for an answer. A token is a byte or more, so only long prompts are rendered. The environment of the first
    row of each task is also tried with one step, and its warning is logged.

    Raises ValueError naming the first such row of a task that refuses them; for an answer or a memory.budget
    that does not fit into ``context`` (tokens) by itself; and for an environment that raises."""
    answer_tokens, keys = find_longest_answer(recipe.rollout, renderer)
    room = context - answer_tokens
    if room < 1:
        raise ValueError(
            f"an answer has up to {answer_tokens} tokens ({keys}), but the context of {recipe.model.path} "
            f"is {context} tokens; lower {keys}, so that a prompt fits in front"
        )
    if recipe.memory.budget > room and any(task.memory for task in recipe.task.by_name.values()):
        raise ValueError(
            f"memory.budget is {recipe.memory.budget}; with an answer of {answer_tokens} ({keys}) it exceeds "
            f"the context of {context}: lower one of them"
        )
    new_episode = new_episode_factory(recipe, renderer, tools)

    def measure_length(row: Prompt, takes_step: bool = False) -> int:
        try:
            return asyncio.run(_count_tokens(new_episode(row), row, takes_step))
        except Exception as error:
            task = recipe.task.by_name[row.task]
            if isinstance(error, ValueError) or not task.env:
                raise
            sentence = f"{type(error).__name__}: {error}"
            raise ValueError(f"task.env {task.env!r} on {row.where} raised {sentence}; fix it") from error

    sizes, too_long = [_count_bytes(row) for row in rows], list[Prompt]()
    # What the template adds to a prompt is at most the whole of the prompt with most bytes or most messages.
    candidates = (int(np.argmax(counts)) for counts in (sizes, [len(row.messages or ()) for row in rows]))
    template_tokens = max(measure_length(rows[index]) for index in {*candidates})
    for first_row in {row.task: row for row in reversed(rows)}.values():  # the last one to be set stays
        measure_length(first_row, takes_step=True)
    for row, num_bytes in zip(rows, sizes, strict=True):
        if num_bytes + template_tokens <= room or (length := measure_length(row)) <= room:
            continue
        if recipe.task.by_name[row.task].overlong == "refuse":
            raise ValueError(
                f"{row.where} has {length} tokens; with an answer of {answer_tokens} ({keys}) it exceeds the "
                f'context of {context}: shorten it, lower {keys}, or set task.overlong = "filter"'
            )
        too_long.append(row)
    return too_long


async def _count_tokens(env: Env, row: Prompt, takes_step: bool) -> int:
    """Start the episode ``env``, count the tokens of its first context, and close it. With ``takes_step`` a
    user's own environment also takes one step, and its warning is logged."""
    try:
        length = len(await start_env(env))
        if takes_step and isinstance(env, EnvEpisode):
            warning = await env.try_step(str(row.columns.get("answer") or "I do not know."))
            if warning:
                log.warning(f"the environment of {row.where} {warning}")
        return length
    finally:
        await close_env(env)


def check_tokens(tokens: np.ndarray, location: str, renderer: Renderer, vocab_size: int) -> None:
    """Raises ValueError for a token of the row at ``location`` that was added to the tokenizer alone, so that
    the model has no embedding of it."""
    if len(tokens) and (token := int(tokens.max())) >= vocab_size:
        raise ValueError(
            f"{location} has the token {renderer.decode([token], skip_special=False)!r} ({token}); the model "
            f"has embeddings for 0 to {vocab_size - 1}: leave it out, or save the model with "
            "resize_token_embeddings first"
        )


def find_longest_answer(section: RolloutSection, renderer: Renderer) -> tuple[int, str]:
    """Return (largest number of tokens of a turn's answer, the recipe keys that set it)."""
    interruption = new_interruption(section, renderer)
    if interruption is None:
        return section.max_tokens, "rollout.max_tokens"
    return interruption.max_tokens, "rollout.interrupt_after and rollout.answer_tokens"


def new_interruption(rollout: RolloutSection, renderer: Renderer) -> Interruption | None:
    """Make the interruption of thinking; None without rollout.interrupt_after. Raises ValueError for a
    rollout.interrupt_phrase with a token that ends an answer."""
    if not rollout.interrupt_after:
        return None
    phrase = renderer.encode(rollout.interrupt_phrase)
    if stop_tokens := np.intersect1d(phrase, renderer.stop_tokens).tolist():
        raise ValueError(
            f"rollout.interrupt_phrase has {renderer.decode(stop_tokens[:1], skip_special=False)!r}, which "
            "ends an answer; leave it out"
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


def _count_bytes(prompt: Prompt) -> int:
    """Count the bytes of the prompt's text, or of its messages and tools as JSON."""
    if prompt.messages is None:
        return len((prompt.text or "").encode())
    return len(json.dumps([prompt.messages, prompt.tools], ensure_ascii=False, default=str).encode())


def compute_rollout_need(inputs: RunInputs) -> Need:
    """Compute the KV cache need of a training step; assumes two bytes or more per token of a prompt."""
    recipe = inputs.recipe
    prompts = [*inputs.train_prompts, *inputs.eval_prompts]
    prompt_tokens = max(map(_count_bytes, prompts), default=0) // 2 + TEMPLATE_TOKENS
    return compute_step_need(recipe, find_longest_answer(recipe.rollout, inputs.renderer)[0], prompt_tokens)


def new_stage(inputs: RunInputs, engine: Engine, grader: Grader) -> RolloutContext:
    """Make the rollout stage of a run with its ``engine`` and ``grader``."""
    recipe = inputs.recipe
    return RolloutContext(
        engine=engine,
        env=new_episode_factory(recipe, inputs.renderer, inputs.tools, inputs.tool_counters, inputs.agents),
        grader=grader,
        sampling=make_sampling(recipe.rollout, inputs.renderer),
        context_limit=inputs.decoder.config.max_positions,
        interruption=new_interruption(recipe.rollout, inputs.renderer),
        identity=compute_stage_identity(recipe),
        ends_in_thought=inputs.renderer.ends_in_thought,
    )


def make_sampling(rollout: RolloutSection, renderer: Renderer) -> Sampling:
    """Make the sampling parameters of answers that are trained on."""
    return Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop_tokens=renderer.stop_tokens,
        stop_strings=rollout.stop,
    )


def compute_stage_identity(recipe: Recipe) -> str:
    """Hash (twelve hex digits) the parts of the recipe that decide which groups are played and how they are
    judged, without policy, sampling and seeds, and without the folders of paths. Keys that are newer than
    some runs are left out while they have their old meaning, so that the hashes of these runs stay."""
    tree = without_folders(recipe.model_dump(mode="json"), Recipe)
    if not recipe.task.mix:
        del tree["task"]["mix"]
    if not recipe.model.chat_template_kwargs:
        del tree["model"]["chat_template_kwargs"]
    if tree["model"]["backend"] != "transformers":
        del tree["model"]["backend"]
    tasks = (tree["task"], *tree["task"].get("mix", ()))
    for task in tasks:
        if not task["columns"]:
            del task["columns"]
    memories = [task.pop("memory") for task in tasks]
    reward, weights, rollout = tree["reward"], tree["engine"]["weights"], tree["rollout"]
    keys = ("interrupt_after", "answer_tokens", "interrupt_phrase", "think_end")
    interruption = [rollout[key] for key in keys]
    parts = [tree["model"], tree["task"], reward["functions"], reward["weights"], weights, interruption]
    parts += [memories, tree["memory"]] if any(memories) else []
    if any(name.startswith(JUDGE) for name in reward["functions"]):  # with their revisions
        parts.append("ring")  # the pairs that a judge compares, which was once a key of the recipe
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def load_tools(tasks: TaskSection) -> Tools:
    """Load the tools by task, and start their MCP servers. Raises ValueError for tools that cannot be
    loaded."""
    return {name: resolve_tools(task.tools) for name, task in tasks.by_name.items()}


def new_episode_factory(
    recipe: Recipe,
    renderer: Renderer,
    tools: Tools,
    counters: Counter[str] | None = None,
    agents: AgentTasks | None = None,
) -> Callable[[Prompt], Env]:
    """Make the function that makes a new episode of a prompt: in the user's own environment, by an agent, or
    a conversation with the ``tools`` of its task. Episodes count tool calls in ``counters``."""
    counters = Counter() if counters is None else counters
    factories = {
        name: _new_task_factory(
            recipe.memory, task, renderer, tools[name], counters, agents if task.has_agent else None
        )
        for name, task in recipe.task.by_name.items()
    }
    return lambda prompt: factories[prompt.task](prompt)


def _new_task_factory(
    memory: MemorySection,
    task: OneTask,
    renderer: Renderer,
    tools: Mapping[str, Tool],
    counters: Counter[str],
    agents: AgentTasks | None,
) -> Callable[[Prompt], Env]:
    """Make the function that makes an episode of a prompt of one task; ``agents`` is None for a task without
    an agent."""
    turns = task.max_turns
    new_memory = load_app("task.memory")(memory, renderer, counters) if task.memory else None
    if agents is not None:
        return agents.make_episodes(task, counters, new_memory)
    factory, opening = make_factory(task.env, task.env_params) if task.env else None, asyncio.Lock()

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

    def make_episodes(
        self, task: OneTask, counters: Counter[str], new_memory: Callable[[], EpisodeMemory] | None
    ) -> Callable[[Prompt], Env]: ...

    def close(self) -> None: ...


def load_app(name: str) -> Callable[..., Any]:
    """Import the function that ``APPS`` has for ``name``. Raises ModuleNotFoundError if a package that it
    needs is not installed."""
    module, _, function = APPS[name].partition(":")
    return getattr(import_module(module), function)
