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

from ostinato.algo.algorithms import Algorithm
from ostinato.algo.pack import pack
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.env.tasks import Rows
from ostinato.launch.checks import check_recipe as algorithm_of
from ostinato.launch.engine import new_engine
from ostinato.launch.graders import new_grader
from ostinato.launch.inputs import load_tools, make_sampling, new_episode_factory, read_prompts
from ostinato.launch.trainer import new_adapters, new_trainer
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters
from ostinato.model.named import find_model_folder
from ostinato.model.native import BuildError, Kernels, load_kernels
from ostinato.pipeline.credit import assign_credit
from ostinato.pipeline.draft_metrics import collect_answers
from ostinato.render import Renderer
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, play_groups
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Group, HistoryEntry, Request, Sampling

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
            return cls(decoder=decoder, kernels=load_kernels())
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
    def lengths(self) -> dict[str, list[int]]:
        """Tokens of every answer, by prompt."""
        found: dict[str, list[int]] = {}
        for request, answer in zip(self.requests, self.answers, strict=True):
            found.setdefault(request.uid, []).append(len(answer.tokens))
        return found


def record(recipe: Recipe, model: Model, epochs: int, say: Say) -> list[Step]:
    """Train ``recipe`` for ``epochs`` over its ``task.n_train`` prompts without drafts.

    Raises ValueError where the recipe is not the kind that can be replayed: LoRA, answers of one turn without
    stop strings, whole steps per epoch.
    """
    check(recipe)
    rules = algorithm_of(recipe)
    per_step, size = recipe.rollout.prompts_per_step, recipe.rollout.group_size
    each = recipe.task.n_train // per_step
    steps = epochs * each
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"steps": steps})})
    renderer, decoder = Renderer(find_model_folder(recipe.model.path)), model.decoder
    adapters, engine = new_adapters(recipe, decoder), new_engine(recipe, decoder, renderer)
    assert adapters is not None
    trainer, found = new_trainer(recipe, decoder, adapters), list[Step]()
    tasks = Rows(read_prompts(recipe, "train", None), seed=recipe.task.seed)
    with new_grader(recipe) as grader:
        stage = RolloutContext(
            engine=engine,
            env=new_episode_factory(recipe, renderer, load_tools(recipe.task)),
            grader=grader,
            sampling=make_sampling(recipe.rollout, renderer),
            context_limit=decoder.config.max_positions,
        )
        for step in range(1, steps + 1):
            policy = adapters.detach_copy()
            engine.publish(policy, step - 1)
            requests = [
                RolloutRequest(
                    prompt=tasks.prompt(i), seed=(recipe.seed, step, i), group_size=size, step=step
                )
                for i in range((step - 1) * per_step, step * per_step)
            ]
            groups = [one.group for one in asyncio.run(play_groups(stage, requests))]
            _train(recipe, trainer, rules, groups, step - 1)
            found.append(_step(groups, policy, step, (step - 1) // each + 1, stage.sampling))
            say(f"recorded step {step} of {steps}: reward {found[-1].reward:.3f}")
    return found


def _step(groups: Sequence[Group], policy: Adapters, number: int, epoch: int, sampling: Sampling) -> Step:
    played = [(group.prompt.uid, one) for group in groups for one in group.trajectories]
    remembered, _ = collect_answers(groups)
    rewards = [one.reward for many in remembered.values() for one in many if one.reward is not None]
    return Step(
        number=number,
        epoch=epoch,
        adapters=policy,
        requests=tuple(
            Request(tokens=one.turns[0].context, sampling=sampling, seed=one.seed, uid=uid)
            for uid, one in played
        ),
        answers=tuple(one.turns[0].completion for _, one in played),
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


async def answers_of(engine: LocalEngine, requests: Sequence[Request]) -> tuple[Completion, ...]:
    """All completions, in the order of the requests, which are sent at once."""
    done = {index: completion async for index, completion in engine.generate(requests)}
    return tuple(done[index] for index in range(len(requests)))


def _train(
    recipe: Recipe, trainer: PolicyTrainer, rules: Algorithm, groups: Sequence[Group], version: int
) -> None:
    credit = assign_credit(groups, rules, min_verdicts=2, answer_tokens=recipe.rollout.max_tokens)
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
