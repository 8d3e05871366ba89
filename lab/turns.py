"""``ostinato bench turns``: what a conversation costs that sends its whole history again with every turn.

    prefill    of the prompts' tokens, those that were run: each once, however often it was sent
    routes     the experts of every token, put together from the turns, against one pass over the episode
    latency    rollouts with the routes recorded over rollouts without, of conversations and of single turns

Episodes are played by ``rollout.rollout`` in a scripted environment: whatever is answered, the next question
follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from lab.epochs import Model, answers_of
from lab.harness import Bench, Result, Say, option
from lab.paired import Paired, alternate
from lab.settings import Clock
from ostinato.algo.routing import shared_ids
from ostinato.engine.cache import BLOCK
from ostinato.engine.local import LocalEngine
from ostinato.engine.paged import block_bytes
from ostinato.env.tasks import load_tasks
from ostinato.model.lora import Adapters
from ostinato.model.named import model_folder
from ostinato.protocols import Engine
from ostinato.render import Renderer
from ostinato.rollout.convert import samples
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, play
from ostinato.types import Completion, Group, Prompt, Request, Reward, Sampling, Stop, Trajectory

LATENCY_BAR = 1.03  # rollouts with capture over rollouts without


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(Bench):
    """``prompts`` times ``siblings`` episodes at once, of ``turns`` answers of at most ``answer_tokens``;
    ``rounds`` of each latency, of ``least_s`` seconds or more. Single turns: as many as quickstart has."""

    model: str = option("asset:seed-moe", "A Hugging Face folder or a model name.")
    dtype: str = "bfloat16"
    prompts: int = option(16, "Of conversations, with two siblings each.")
    siblings: int = 2
    turns: int = 8
    answer_tokens: int = 48
    single_prompts: int = 16
    single_siblings: int = 16
    rounds: int = option(9, "Rollouts with routes recorded and without.")
    least_s: float = 1.0
    clock: Clock = option(Clock.WALL, "cpu where others use the machine too.")

    def quick(self) -> Turns:
        return replace(self, prompts=min(4, self.prompts), single_prompts=4, rounds=2, least_s=0.0)

    def measure(self, say: Say) -> dict[str, Any]:
        folder = str(model_folder(self.model))
        model = Model.load(folder, dtype=self.dtype, fp32_head=True, say=say)
        work = Work.of(self, folder)
        capturing = new_engine(self, model, work, record_routing=True)
        before = asdict(capturing.counters)
        groups = conversations(self, work, capturing)
        spent = {name: count - before[name] for name, count in asdict(capturing.counters).items()}
        result: dict[str, Any] = {
            "model": self.model,
            "turns": self.turns,
            "episodes": self.prompts * self.siblings,
        }
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        result["prefill"] = prefill(trajectories) | {name: spent[name] for name in ("prefilled", "preempted")}
        say(_prefill_line(result["prefill"]))
        if model.decoder.num_moe_layers:
            result["routes"] = routes(groups, capturing)
            say(_routes_line(result["routes"]))
            result["latency"] = _latency(self, model, work, capturing, say)
        return result | {"bar": LATENCY_BAR, "settings": asdict(self)}

    @staticmethod
    def table(result: Result) -> Table:
        settings = result["settings"]
        title = f"{result['model']}: {result['episodes']} episodes of {result['turns']} turns"
        out = Table("what", "measured", "bar", title=title, show_header=True)
        counts = result["prefill"]
        out.add_row("tokens sent by turns after the first", str(counts["sent"]), "")
        out.add_row("of them run / new", f"{counts['run']} / {counts['new']}", "")
        out.add_row("run again", str(counts["run_again"]), "0")
        if "routes" in result:
            found = result["routes"]
            out.add_row("episodes with all routes", f"{found['complete']:.2%}", "100 %")
            out.add_row("routes equal to one pass over the episode", f"{found['equal']:.4%}", "")
            for name, label in (("turns", "conversations"), ("single", "single turns")):
                pair = result["latency"][name]
                shown = (
                    f"{pair['ratio']:.3f} ({pair['low']:.3f} to {pair['high']:.3f}) in {settings['clock']} s"
                )
                out.add_row(f"latency with capture / without, {label}", shown, f"{result['bar']:g}")
        return out


# ---- what is played


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What episodes are made of."""

    prompts: tuple[Prompt, ...]
    questions: tuple[np.ndarray, ...]  # tokens of prompts: the contexts of all turns come from here
    stop_tokens: tuple[int, ...]

    @classmethod
    def of(cls, bench: Turns, folder: str) -> Work:
        renderer = Renderer(model_folder(folder))
        needed = max(bench.prompts * bench.turns, bench.single_prompts)
        prompts = load_tasks("arithmetic", "train", 0, needed)
        return cls(
            prompts=tuple(prompts),
            questions=tuple(renderer.prompt(prompt) for prompt in prompts),
            stop_tokens=renderer.stop_tokens,
        )

    @property
    def longest(self) -> int:
        return max(map(len, self.questions))


class Scripted:
    """An episode that says ``contexts`` one after another, whatever is answered. Implements protocols.Env."""

    def __init__(self, contexts: Sequence[np.ndarray]) -> None:
        self._contexts = iter(contexts)

    def start(self) -> np.ndarray:
        return next(self._contexts)

    async def step(self, completion: Completion) -> np.ndarray | None:
        return next(self._contexts, None)


@dataclass(frozen=True, slots=True)
class Patient:
    """An engine whose answers count as ended wherever they stop: no episode is over before its last turn."""

    engine: Engine

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        async for index, completion in self.engine.generate(requests):
            ended = completion.stop is Stop.LENGTH
            yield index, replace(completion, stop=Stop.EOS) if ended else completion

    def publish(self, adapters: Adapters | None, version: int) -> None:
        self.engine.publish(adapters, version)


class FullMarks:
    """Grades nothing: every episode counts. Implements protocols.Grader."""

    async def grade(self, group: Group) -> list[Reward]:
        return [Reward(value=1.0) for _ in group.trajectories]


def conversations(bench: Turns, work: Work, engine: LocalEngine) -> list[Group]:
    """The episodes of the bench, from an empty prefix tree: prompt i has questions i, i + prompts, ..."""
    chosen = [work.questions[i :: bench.prompts][: bench.turns] for i in range(bench.prompts)]
    return _played(engine, work, chosen, bench.siblings, bench.answer_tokens)


def single_turns(bench: Turns, work: Work, engine: LocalEngine) -> list[Group]:
    """One answer to each of quickstart's prompts by each sibling."""
    chosen = [(question,) for question in work.questions[: bench.single_prompts]]
    return _played(engine, work, chosen, bench.single_siblings, bench.answer_tokens)


def _played(
    engine: LocalEngine,
    work: Work,
    contexts: Sequence[Sequence[np.ndarray]],
    siblings: int,
    answer_tokens: int,
) -> list[Group]:
    prompts = work.prompts[: len(contexts)]
    context_of = {prompt.uid: context for prompt, context in zip(prompts, contexts, strict=True)}
    stage = RolloutContext(
        engine=Patient(engine),
        env=lambda prompt: Scripted(context_of[prompt.uid]),
        grader=FullMarks(),
        sampling=Sampling(max_tokens=answer_tokens, stop_tokens=work.stop_tokens),
        context_limit=engine.context_limit,
    )
    requests = [
        RolloutRequest(prompt=p, seed=(0, 1, i), group_size=siblings, step=1) for i, p in enumerate(prompts)
    ]
    engine.publish(None, engine.version + 1)  # forgets the prefix tree
    return [played.group for played in asyncio.run(play(stage, requests))]


def new_engine(bench: Turns, model: Model, work: Work, *, record_routing: bool) -> LocalEngine:
    """With room for all episodes of either kind at once: what is evicted would have to be run again."""
    decoder, episodes = model.decoder, bench.prompts * bench.siblings
    length = bench.turns * (work.longest + bench.answer_tokens)
    if length > decoder.config.max_positions:
        raise ValueError(
            f"{bench.turns} turns may take {length} tokens, but the context of {bench.model} is "
            f"{decoder.config.max_positions}; lower --turns or --answer-tokens"
        )
    singles = bench.single_prompts * bench.single_siblings
    single = work.longest + bench.answer_tokens
    blocks = max(episodes * (length // BLOCK + 2), singles * (single // BLOCK + 2))
    each = block_bytes(decoder.config.num_layers, decoder.kv_shape, decoder.dtype)
    return LocalEngine(
        decoder,
        kernels=model.kernels,
        kv_memory_mb=(5 * blocks * each // 4 >> 20) + 1,
        context_limit=decoder.config.max_positions,
        record_routing=record_routing,
    )


# ---- what is made of it


def prefill(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Token counts over the later turns (the first has no history): ``sent`` as prompts, ``cached`` of them,
    ``run``, and ``new``, which nothing has seen before: the context, and the last token of the answer before,
    which was sampled and never an input. ``run_again`` is what was run beyond the new ones, turn by turn.
    """
    sent, cached, new, again = 0, 0, 0, 0
    for prompt_len, fresh, found in _later_turns(trajectories):
        sent, cached, new = sent + prompt_len, cached + found, new + fresh
        again += max(0, prompt_len - found - fresh)
    return {"sent": sent, "cached": cached, "run": sent - cached, "new": new, "run_again": again}


def _later_turns(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, int, int]]:
    """(tokens of the prompt, new ones among them, those found in the cache) of every turn but the first."""
    for trajectory in trajectories:
        before = 0
        for index, turn in enumerate(trajectory.turns):
            prompt_len = before + len(turn.context)
            if index:
                yield prompt_len, len(turn.context) + 1, turn.completion.cached_tokens
            before = prompt_len + len(turn.completion.tokens)


def routes(groups: Sequence[Group], engine: LocalEngine) -> dict[str, float]:
    """``complete``: the share of episodes with the route of every input token; ``equal``: the share of
    (token, layer) pairs with the very experts that one pass over the whole episode chooses; ``overlap``: the
    mean share of ids in common."""
    made = [
        sample
        for index, group in enumerate(groups)
        for sample in samples(group, index, np.ones(len(group.trajectories)))
    ]
    with_routes = [sample for sample in made if sample.experts is not None]
    engine.publish(None, engine.version + 1)
    requests = [
        Request(tokens=one.tokens, sampling=Sampling(max_tokens=1), seed=(0, 0)) for one in with_routes
    ]
    shares = []
    for sample, answer in zip(with_routes, asyncio.run(answers_of(engine, requests)), strict=True):
        assert sample.experts is not None and answer.prompt_experts is not None
        shares.append(shared_ids(answer.prompt_experts, sample.experts)[:-1].ravel())
    every = np.concatenate([*shares, np.zeros(0, np.float32)])
    return {
        "complete": len(with_routes) / len(made),
        "equal": float((every == 1).mean()) if every.size else 0.0,
        "overlap": float(every.mean()) if every.size else 0.0,
    }


def _latency(bench: Turns, model: Model, work: Work, capturing: LocalEngine, say: Say) -> dict[str, Any]:
    blind = new_engine(bench, model, work, record_routing=False)
    found: dict[str, Any] = {}
    for name, act in (("turns", conversations), ("single", single_turns)):

        def rollout(engine: LocalEngine, act: Any = act) -> Callable[[], object]:
            return lambda: act(bench, work, engine)

        pairs: Paired = alternate(
            rollout(blind), rollout(capturing), bench.rounds, bench.clock.read, bench.least_s
        )
        found[name] = pairs.figures()
        say(f"{name}: {_latency_line(found[name])}")
    return found


def _prefill_line(counts: Mapping[str, int]) -> str:
    return (
        f"turns after the first sent {counts['sent']} tokens; {counts['cached']} were in the cache, "
        f"{counts['run']} were run, {counts['new']} were new, {counts['run_again']} were run again"
    )


def _routes_line(found: Mapping[str, float]) -> str:
    return (
        f"routes of {found['complete']:.1%} of the episodes are complete; {found['equal']:.4%} of them are "
        "those of one pass over the whole episode"
    )


def _latency_line(pair: Mapping[str, Any]) -> str:
    return (
        f"{pair['ratio']:.3f} ({pair['low']:.3f} to {pair['high']:.3f}) times as long with routes recorded, "
        f"{pair['base_s']:.2f} s without"
    )
