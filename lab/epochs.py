"""A recipe trained for a few epochs with plain decoding, recorded: what every arm of ``bench draft`` replays.

Tokens do not depend on drafts, so the policies, the requests and the answers of a run can be recorded once
and rolled out again by any drafter, at any batch size: all arms see the same policy at every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.algo.pack import pack
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.env.tasks import Rows, load_tasks
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.named import model_folder
from ostinato.model.native import BuildError, Kernels, load
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.pipeline.credit import assign
from ostinato.pipeline.draft_metrics import pasts
from ostinato.render import Renderer
from ostinato.reward.workers import WorkerGrader
from ostinato.rollout.rollout import grade
from ostinato.train.optimizer import OptimizerSettings, Schedule
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Group, HistoryEntry, Prompt, Request, Sampling, Stop, Trajectory, Turn

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """What every arm shares: the decoder's tensors and the kernels."""

    decoder: Decoder
    kernels: Kernels | None

    @classmethod
    def load(cls, folder: str, *, dtype: str, fp32_head: bool, say: Say) -> Model:
        """The model in ``folder`` on the CPU, with native kernels where there is a compiler."""
        decoder = load_model(folder, dtype=getattr(torch, dtype), device="cpu", fp32_head=fp32_head)
        try:
            return cls(decoder=decoder, kernels=load())
        except BuildError as error:
            say(f"without native kernels: {error}")
            return cls(decoder=decoder, kernels=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One recorded step: the policy, its requests, and what plain decoding answered."""

    number: int  # from 1
    epoch: int  # from 1
    adapters: Adapters
    requests: tuple[Request, ...]  # groups one after another
    answers: tuple[Completion, ...]  # in the order of the requests
    pasts: Mapping[str, Sequence[HistoryEntry]]  # by prompt, as history keeps them
    reward: float  # mean over the step

    @property
    def lengths(self) -> dict[str, list[tuple[int, bool]]]:
        """(tokens, whether it was truncated) of every answer, by prompt."""
        found: dict[str, list[tuple[int, bool]]] = {}
        for request, answer in zip(self.requests, self.answers, strict=True):
            found.setdefault(request.uid, []).append((len(answer.tokens), answer.stop is Stop.LENGTH))
        return found


def record(recipe: Recipe, model: Model, epochs: int, say: Say) -> list[Step]:
    """Train ``recipe`` for ``epochs`` over its ``task.n_train`` prompts without drafts.

    Raises ValueError where the recipe is not the kind that can be replayed: LoRA, answers of one turn without
    stop strings, whole steps per epoch.
    """
    check(recipe)
    task, per_step = recipe.task, recipe.rollout.prompts_per_step
    prompts = load_tasks(task.source, "train", task.seed, task.n_train, task.params, task.system_prompt)
    tasks = Rows(prompts, seed=task.seed)
    steps_per_epoch = task.n_train // per_step
    steps: list[Step] = []
    with WorkerGrader(
        list(recipe.reward.functions),
        weights=list(recipe.reward.weights) or None,
        timeout_s=recipe.reward.timeout_s,
        workers=recipe.reward.workers,
    ) as grader:
        parts = _Parts.of(recipe, model, grader, epochs * steps_per_epoch)
        for index in range(epochs * steps_per_epoch):
            rows = [tasks.prompt(i) for i in range(index * per_step, (index + 1) * per_step)]
            steps.append(parts.step(rows, index, index // steps_per_epoch + 1))
            say(f"recorded step {index + 1} of {epochs * steps_per_epoch}: reward {steps[-1].reward:.3f}")
    return steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """What a recorded step is made with."""

    recipe: Recipe
    renderer: Renderer
    engine: LocalEngine
    grader: WorkerGrader
    adapters: Adapters  # in training
    rules: Algorithm
    trainer: PolicyTrainer

    @classmethod
    def of(cls, recipe: Recipe, model: Model, grader: WorkerGrader, steps: int) -> _Parts:
        renderer, config = Renderer(model_folder(recipe.model.path)), model.decoder.config
        adapters = init_adapters(config, _adapter_spec(recipe), recipe.seed, model.decoder.device)
        rules = algorithm(recipe.algo.name, **recipe.algo.overrides)
        engine = LocalEngine(
            model.decoder,
            kernels=model.kernels,
            decode=renderer.decode,
            kv_memory_mb=recipe.engine.kv_memory_mb,
            max_batch=recipe.engine.max_batch,
            context_limit=config.max_positions,
        )
        return cls(
            recipe=recipe,
            renderer=renderer,
            engine=engine,
            grader=grader,
            adapters=adapters,
            rules=rules,
            trainer=_trainer(recipe, model, adapters, rules, steps),
        )

    def step(self, prompts: Sequence[Prompt], index: int, epoch: int) -> Step:
        """Roll out, grade, and train; ``index`` counts from 0."""
        policy = self.adapters.detach_copy()
        self.engine.publish(policy, index)
        requests = _requests(self.recipe, self.renderer, prompts, index)
        answers = asyncio.run(answers_of(self.engine, requests))
        groups = asyncio.run(_graded(self.grader, prompts, requests, answers, index))
        _train(self.recipe, self.trainer, self.rules, groups, index)
        remembered, _ = pasts(groups)
        rewards = [one.reward for many in remembered.values() for one in many if one.reward is not None]
        return Step(
            number=index + 1,
            epoch=epoch,
            adapters=policy,
            requests=requests,
            answers=answers,
            pasts=remembered,
            reward=float(np.mean(rewards)) if rewards else float("nan"),
        )


def check(recipe: Recipe) -> None:
    """Raises ValueError where ``record`` would."""
    if recipe.adapter.kind != "lora":
        raise ValueError(f'adapter.kind is "{recipe.adapter.kind}"; bench draft replays policies of "lora"')
    if recipe.task.max_turns > 1:
        raise ValueError(f"task.max_turns is {recipe.task.max_turns}; only one turn is replayed")
    if recipe.rollout.stop:
        raise ValueError(
            f"rollout.stop is {list(recipe.rollout.stop)}; only tokens are timed here, leave it out"
        )
    n, per_step = recipe.task.n_train, recipe.rollout.prompts_per_step
    if n == 0 or n % per_step:
        raise ValueError(
            f"task.n_train is {n}; use a multiple of rollout.prompts_per_step ({per_step}), so that every "
            "epoch has the same steps"
        )


def _adapter_spec(recipe: Recipe) -> AdapterSpec:
    section = recipe.adapter
    return AdapterSpec(
        rank=section.rank,
        alpha=section.alpha,
        targets=section.targets,
        expert_scheme=ExpertScheme(section.expert_scheme),
        expert_rank=section.expert_rank or None,
    )


def _trainer(recipe: Recipe, model: Model, adapters: Adapters, rules: Algorithm, steps: int) -> PolicyTrainer:
    settings = recipe.trainer
    return PolicyTrainer(
        model.decoder,
        adapters,
        rules,
        optimizer=OptimizerSettings(
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            schedule=Schedule(settings.schedule),
            warmup_steps=settings.warmup_steps,
            total_steps=steps,
        ),
        temperature=recipe.rollout.temperature,
        ops=model.kernels.training if model.kernels else TORCH_OPS,
    )


def _requests(
    recipe: Recipe, renderer: Renderer, prompts: Sequence[Prompt], step: int
) -> tuple[Request, ...]:
    rollout = recipe.rollout
    sampling = Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop_tokens=renderer.stop_tokens,
        stop_strings=rollout.stop,
    )
    first = step * len(prompts)
    return tuple(
        Request(tokens=context, sampling=sampling, seed=(recipe.seed, step + 1, first + i, k), uid=prompt.uid)
        for i, prompt in enumerate(prompts)
        for context in (renderer.prompt(prompt),)
        for k in range(rollout.group_size)
    )


async def answers_of(engine: LocalEngine, requests: Sequence[Request]) -> tuple[Completion, ...]:
    """All completions, in the order of the requests, which are sent at once."""
    done = {index: completion async for index, completion in engine.generate(requests)}
    return tuple(done[index] for index in range(len(requests)))


async def _graded(
    grader: WorkerGrader,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    answers: Sequence[Completion],
    step: int,
) -> list[Group]:
    trajectories = [
        Trajectory(
            turns=(Turn(context=request.tokens, completion=answer),), stop=answer.stop, seed=request.seed
        )
        for request, answer in zip(requests, answers, strict=True)
    ]
    size = len(trajectories) // len(prompts)
    groups = [
        Group(prompt=prompt, trajectories=tuple(trajectories[i * size : (i + 1) * size]), step=step + 1)
        for i, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*(grade(grader, group) for group in groups)))


def _train(
    recipe: Recipe, trainer: PolicyTrainer, rules: Algorithm, groups: Sequence[Group], version: int
) -> None:
    credit = assign(groups, rules, min_verdicts=2, answer_tokens=recipe.rollout.max_tokens)
    if credit.samples:
        trainer.step(
            pack(
                credit.samples,
                credit.weights,
                tokens_per_microbatch=recipe.trainer.tokens_per_microbatch,
                minibatches=recipe.trainer.minibatches,
                version=version,
            )
        )
