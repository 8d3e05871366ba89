"""The loop of a run, from its inputs and components: its ledger, checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ostinato.config import Recipe, dump_toml
from ostinato.engine.local import LocalEngine
from ostinato.every import Every, spent_in_steps
from ostinato.launch.checks import check, solved_at
from ostinato.launch.components import RunComponents
from ostinato.launch.device_memory import peak_flops
from ostinato.launch.drafts import Memory, save_history
from ostinato.launch.engine import new_engine
from ostinato.launch.evaluations import evaluations
from ostinato.launch.forgetting import new_forgetting
from ostinato.launch.inputs import RunInputs, longest_answer, new_stage, new_tasks, rollout_need
from ostinato.launch.introduction import device_name, own_weights
from ostinato.launch.models import newest_checkpoint
from ostinato.launch.policy import write_policy
from ostinato.model.base import Base
from ostinato.model.flops import FlopModel
from ostinato.model.lora import Adapters
from ostinato.observe.ledger import Ledger, SteadyClock, Terms
from ostinato.pipeline.account import evaluation_work
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.evaluate import Evaluation, evaluate_groups
from ostinato.pipeline.loop import Loop, LoopState, Plan
from ostinato.pipeline.state import Observer
from ostinato.protocols import MetricWriter, RestorableTrainer
from ostinato.run import RunFolder, atomic_folder, to_json
from ostinato.train.checkpoint import Checkpoint, oldest_step, repair, save_checkpoint
from ostinato.types import Prompt

logger = logging.getLogger(__name__)


def new_evaluations(prepared: RunInputs) -> list[Evaluation]:
    """The main one first."""
    return evaluations(
        prepared.recipe,
        prepared.eval_prompts,
        prepared.downstream,
        stop_tokens=prepared.renderer.stop_tokens,
        solved_at=mark(prepared.recipe),
        weights=eval_weights(prepared.recipe),
    )


def eval_weights(recipe: Recipe) -> str:
    """Whose weights the run's held-out scores are of: "model", or those of a sampler with its own."""
    return recipe.engine.weights if own_weights(recipe) else "model"


async def score_exported(
    prepared: RunInputs, adapters: Adapters | None, state: LoopState, ledger: Ledger
) -> dict[str, Any]:
    """The held-out row of the policy as it is exported: with the model's weights, whatever the run sampled
    with."""
    sampler = prepared.recipe.engine.model_copy(update={"weights": "model"})
    exact = dataclasses.replace(prepared, recipe=prepared.recipe.model_copy(update={"engine": sampler}))
    engine = new_engine(exact.recipe, exact.decoder, exact.renderer, need=rollout_need(exact))
    engine.publish(adapters, state.step)
    stage, main = new_stage(exact, engine, exact.grader), new_evaluations(exact)[0]
    with ledger.work(), ledger.evaluating():
        row, groups = await evaluate_groups(stage, main, state.step)
    work = evaluation_work(groups, new_flops(exact.recipe, exact.decoder, adapters))
    ledger.evaluation(state.step, "exported", row["seconds"], work)
    return row | {"exported": True, "spent": spent_in_steps(state.step, state.totals)}


def new_budget(recipe: Recipe) -> Every:
    """What the run may spend until it stops, for good or for now."""
    return Every.parse(recipe.trainer.budget, "trainer.budget").part(recipe.trainer.until)


def mark(recipe: Recipe) -> float:
    """The reward from which an answer is solved: the same for all tasks of a mixture."""
    return solved_at(recipe.judges(next(iter(recipe.task.by_name))))


def new_flops(recipe: Recipe, decoder: Base, adapters: Adapters | None) -> FlopModel:
    """What rows of rollouts and of training cost."""
    return decoder.flops(
        adapters.spec if adapters else None,
        recompute=recipe.trainer.recompute,
        entropy_gradient=check(recipe).needs_entropy,
    )


def new_loop(
    prepared: RunInputs,
    components: RunComponents,
    run: RunFolder,
    state: LoopState,
    *,
    ledger: Ledger,
    observer: Observer,
    writers: Sequence[MetricWriter] = (),
) -> Loop:
    """The run, assembled."""
    recipe, trainer, memory = prepared.recipe, components.trainer, components.memory
    flops, rows = new_flops(recipe, prepared.decoder, trainer.adapters()), row_digests(prepared)

    def save(state: LoopState) -> int:
        counts = {"trainer": trainer.counters(), "loop": state.to_json(), "rows": rows}
        tensors, identity = trainer.tensors(), trainer.identity()
        checkpoint = Checkpoint(step=state.step, tensors=tensors, state=counts, identity=identity)
        save_checkpoint(run.checkpoints, checkpoint, keep=recipe.trainer.keep_checkpoints)
        if memory is not None:
            save_history(memory.history, run.history)
        return oldest_step(run.checkpoints)

    def keep(step: int) -> None:
        with atomic_folder(run.scored / f"step-{step:08d}") as to:
            write_policy(prepared.decoder, trainer.adapters(), prepared.folder, to, recipe.model.path)

    return Loop(
        plan=Plan(
            recipe=recipe,
            answer_tokens=longest_answer(recipe, prepared.renderer)[0]
            * max(task.max_turns for task in recipe.task.by_name.values()),
            solved_at=mark(recipe),
            budget=new_budget(recipe),
            flops=flops,
            peak_flops=peak_flops(prepared.decoder),
        ),
        stage=new_stage(prepared, components.engine, prepared.grader),
        tasks=new_tasks(prepared),
        trainer=trainer,
        algorithm=check(recipe),
        folder=run,
        state=state,
        evaluations=new_evaluations(prepared),
        observer=observer,
        workers=components,
        writers=writers,
        ledger=ledger,
        counters=(prepared.grader.counters, prepared.tool_counters, *components.counters),
        span_sources=components.span_sources,
        worker=components.loop_worker,
        forgetting=new_forgetting(prepared, trainer, run, flops),
        drafting=components.drafting,
        save=save,
        keep=keep if recipe.eval.keep_weights else lambda step: None,
    )


def new_drafting(memory: Memory, engine: LocalEngine) -> Drafting:
    """The accounts of drafts, and what remembers the answers for the next ones."""
    history, counters = memory.history, engine.counters
    return Drafting(
        store=history,
        lengths=history.lengths,
        drafter=memory.drafter,
        saved_s=lambda: counters.seconds_without - counters.seconds,
    )


TRAINED, HELD_OUT = "to train on", "held out"


def row_digests(prepared: RunInputs) -> dict[str, str]:
    """Hashes (twelve hex digits) of the rows that a run trains on, and of those that it is scored on."""
    scored = [*prepared.eval_prompts, *(row for rows in prepared.downstream.values() for row in rows)]
    return {TRAINED: _digest(prepared.train_prompts), HELD_OUT: _digest(scored)}


def _digest(prompts: Sequence[Prompt]) -> str:
    found = hashlib.sha256()
    for prompt in prompts:
        shown = [prompt.text, prompt.messages, prompt.tools, prompt.template_kwargs]
        found.update(to_json({"row": [prompt.uid, prompt.task, *shown, prompt.columns]}).encode())
    return found.hexdigest()[:12]


def check_rows(
    run: RunFolder, saved: Mapping[str, str] | None, now: Mapping[str, str], changed: Set[str]
) -> None:
    """Raises ValueError where digests of rows are not those in the run's checkpoint, ``saved`` (None: of a
    version without them), unless a section of the recipe that chooses the rows was ``changed``."""
    if saved is None:
        logger.info(f"{run.path} has no digest of its rows, so they are not compared with those of its start")
        return
    choosing = {TRAINED: {"task"}, HELD_OUT: {"task", "eval"}}
    for kind in now:
        if saved.get(kind) == now[kind]:
            continue
        if changed & choosing[kind]:
            logger.warning(f"the rows {kind} are from here on not those that {run.path} began with")
        else:
            raise ValueError(
                f"the rows {kind} are not those that {run.path} began with; give task.source the same rows, "
                "or start a new run; to go on with these, name them: "
                f"ostinato resume {run.path} task.source=..."
            )


def restore(
    run: RunFolder, trainer: RestorableTrainer, prepared: RunInputs, changed: Set[str] = frozenset()
) -> LoopState:
    """Put ``trainer`` where the newest whole checkpoint of ``run`` was taken; the start without one. What a
    killed process left half written goes: only for the holder of the run's lock. ``changed``: sections of the
    recipe. Raises ValueError for other rows, see ``check_rows``."""
    repair(run.checkpoints)
    checkpoint = newest_checkpoint(run, trainer)
    if checkpoint is None:
        logger.info(f"{run.path} has no checkpoint, so the run begins again")
        return LoopState()
    check_rows(run, checkpoint.state.get("rows"), row_digests(prepared), changed)
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    return LoopState(**checkpoint.state["loop"])


def new_ledger(
    recipe: Recipe,
    run: RunFolder,
    decoder: Base,
    clock: SteadyClock,
    pools: Mapping[str, int] | None = None,
) -> Ledger:
    """The ledger of one process, which began when ``clock`` did. ``pools``: devices by pool where workers
    have them; otherwise the recipe's."""
    section = recipe.ledger
    terms = Terms(
        devices=sum(pools.values()) if pools else section.devices,
        pools=pools or {},
        device=device_name(decoder) or "cpu",
        price_per_device_hour=section.price_per_device_hour,
        currency=section.currency,
        recipe=hashlib.sha256(dump_toml(recipe).encode()).hexdigest()[:12],
    )
    return Ledger(folder=run, terms=terms, clock=clock)
