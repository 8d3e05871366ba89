"""What a run reads: model, tokenizer, prompts and rewards, loaded and checked before any work starts.

Raises ValueError with one sentence for what the user can mend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ostinato.config import Recipe
from ostinato.config.sections import REMOTE, TaskSection
from ostinato.env.custom import SEEDS, EnvEpisode, factory, seeds
from ostinato.env.dialogue import Dialogue
from ostinato.env.tasks import check_disjoint, load_tasks, with_system
from ostinato.env.tools import resolve_tools
from ostinato.launch.checks import check
from ostinato.launch.engine import shares
from ostinato.launch.evaluations import downstream_prompts
from ostinato.launch.graders import new_grader
from ostinato.launch.models import load_decoder
from ostinato.launch.solved import check_solvable
from ostinato.model.decoder import Decoder
from ostinato.model.named import model_folder
from ostinato.protocols import Engine, Env, Grader
from ostinato.render import Renderer
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.rollout import RolloutContext
from ostinato.types import Prompt, Sampling

if TYPE_CHECKING:
    from ostinato.serve.agents import AgentServer


log = logging.getLogger(__name__)
KEY = "OSTINATO_API_KEY"


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
    agents: AgentServer | None = None
    tool_counters: Counter[str] = dataclasses.field(default_factory=Counter)
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
    check(recipe)
    check_solvable(recipe.reward)
    folder = model_folder(recipe.model.path)
    renderer = Renderer(folder)
    train_prompts = prompts(recipe, "train", recipe.task.n_train or None) if training else []
    eval_prompts = prompts(recipe, recipe.eval.split, recipe.eval.n)
    if training and recipe.eval.split == "eval" and recipe.task.source != SEEDS:
        check_disjoint(train_prompts, eval_prompts)
    downstream = downstream_prompts(recipe, train_prompts)
    scored = [*eval_prompts, *(prompt for each in downstream.values() for prompt in each)]
    decoder = load_decoder(recipe.model, folder, shared=training and shares(recipe))
    check_lengths(recipe, [*train_prompts, *scored], renderer, decoder.config.max_positions)
    grader = new_grader(recipe)

    def encode(text: str) -> list[int]:
        return renderer.encode(text).tolist()

    try:
        sets = [rows for rows in (train_prompts, eval_prompts, *downstream.values()) if rows]
        found = [warning for rows in sets for warning in grader.check(rows[0], encode)]
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
        left_open=grader.left_open,
        warnings=list({warning.partition("\n")[0]: warning for warning in found}.values()),
    )


def _agents(recipe: Recipe, renderer: Renderer) -> AgentServer | None:
    """The server that agents call. ValueError without what it needs."""
    if not recipe.task.has_agent:
        return None
    try:
        from ostinato.serve.agents import AgentServer
        from ostinato.serve.elsewhere import Place
    except ModuleNotFoundError as error:
        raise ValueError(f'agents need {error.name}; install it: pip install "ostinato[serve]"') from None
    if not renderer.has_chat_template:
        raise ValueError(f"task.agent needs a chat template, and {renderer.folder} has none")
    task, place = recipe.task, Place()
    if task.agent_elsewhere:
        key = key_for(task.agent_host, "task.agent_host")
        place = Place(host=task.agent_host, port=task.agent_port, address=task.agent_address, key=key)
    server = AgentServer(renderer, place, calls=task.agent_tool_calls, wait_s=task.agent_wait_s)
    if task.agent == REMOTE:
        log.info("agents fetch rollouts at %s/rollouts/next", server.address)
    return server


def key_for(host: str, name: str) -> str:
    """What agents elsewhere send: $OSTINATO_API_KEY. ValueError where ``host`` needs one and has none."""
    from ostinato.serve.server import is_loopback

    if not (key := os.environ.get(KEY, "")) and not is_loopback(host):
        raise ValueError(
            f"{name} {host} can be reached by other machines; set a key: {KEY} in the environment"
        )
    return key


def prompts(recipe: Recipe, split: str, n: int | None) -> list[Prompt]:
    task = recipe.task
    if task.source != SEEDS:
        return load_tasks(task.source, split, task.seed, n, task.params, task.system_prompt)
    if n is None:
        raise ValueError(f"task.n_train is 0; task.source {SEEDS!r} is endless, say how many prompts to draw")
    make = factory(task.env, task.env_params) if task.env else None
    rows = seeds(make, task.env, split, task.seed, n)
    return [with_system(row, task.system_prompt) for row in rows] if task.system_prompt else rows


def check_lengths(recipe: Recipe, rows: Sequence[Prompt], renderer: Renderer, context: int) -> None:
    """Every prompt leaves room for an answer. A token is a byte or more, so only long texts are tokenised."""
    longest, keys = longest_answer(recipe, renderer)
    room = context - longest
    if room < 1:
        raise ValueError(
            f"an answer has up to {longest} tokens ({keys}), but the context of {recipe.model.path} "
            f"is {context} tokens; lower {keys}, so that a prompt fits in front"
        )
    episode = environment(recipe, renderer)
    sizes = [_bytes(row) for row in rows]
    # the longest prompt is rendered in any case: it bounds what the template adds, if there is one
    template = len(episode(rows[int(np.argmax(sizes))]).start())
    for row, size in zip(rows, sizes, strict=True):
        if size + template > room and (length := len(episode(row).start())) > room:
            raise ValueError(
                f"prompt {row.uid} has {length} tokens; with an answer of {longest} ({keys}) it exceeds the "
                f"context of {context}: shorten it, leave it out, or lower {keys}"
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
    texts = [prompt.text or ""] if prompt.messages is None else [m["content"] for m in prompt.messages]
    return sum(len(text.encode()) for text in texts)


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
    judged, beside the policy, the sampling and the seeds."""
    tree = recipe.model_dump(mode="json")
    reward, weights, rollout = tree["reward"], tree["engine"]["weights"], tree["rollout"]
    keys = ("interrupt_after", "answer_tokens", "interrupt_phrase", "think_end")
    interruption = [rollout[key] for key in keys]
    played = [tree["model"], tree["task"], reward["functions"], reward["weights"], weights, interruption]
    return hashlib.sha256(json.dumps(played, sort_keys=True).encode()).hexdigest()[:12]


def environment(
    recipe: Recipe,
    renderer: Renderer,
    counters: Counter[str] | None = None,
    agents: AgentServer | None = None,
) -> Callable[[Prompt], Env]:
    """A fresh episode per prompt: of an environment of one's own, one turn, or a conversation with tools,
    whose calls ``counters`` counts."""
    tools, turns = resolve_tools(recipe.task.tools), recipe.task.max_turns
    if agents is not None:
        return _agent_episodes(recipe.task, agents, Counter() if counters is None else counters)
    if recipe.task.env:
        make = factory(recipe.task.env, recipe.task.env_params)
        return lambda prompt: EnvEpisode(prompt, renderer, make, turns, counters=counters)
    return lambda prompt: Dialogue(prompt, renderer, tools=tools, max_turns=turns, counters=counters)


def _agent_episodes(
    task: TaskSection, agents: AgentServer, counters: Counter[str]
) -> Callable[[Prompt], Env]:
    from ostinato.serve.agents import AgentEpisode, agent_of

    if task.agent == REMOTE:
        agent = agents.elsewhere.fetched
    elif task.agent_url:
        agent = partial(agents.elsewhere.sent, task.agent_url)
    else:
        agent = agent_of(task.agent, task.agent_command)

    def episode(prompt: Prompt) -> Env:
        return AgentEpisode(
            agents,
            agent,
            prompt,
            max_calls=task.max_turns,
            silence_s=task.agent_silence_s,
            counters=counters,
            queued=task.agent == REMOTE,
        )

    return episode
