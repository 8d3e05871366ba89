"""Construction of a run's loop from its inputs and components, with its evaluations, ledger and
checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ostinato.algo.offpolicy import Correction
from ostinato.config import Recipe, TrainerSection, dump_toml
from ostinato.config.fields import without_folders
from ostinato.engine.threads import Threads
from ostinato.every import NEVER, Every, spent_in_steps
from ostinato.hf.model import TransformersModel
from ostinato.launch.checks import compute_solved_at, has_own_weights, list_caveats
from ostinato.launch.device_memory import find_peak_flops
from ostinato.launch.drafts import Memory, save_history
from ostinato.launch.engine import new_engine
from ostinato.launch.forgetting import new_forgetting
from ostinato.launch.inputs import RunInputs, compute_rollout_need, find_longest_answer, new_stage, new_tasks
from ostinato.launch.machine import find_device_name
from ostinato.launch.models import load_newest_checkpoint
from ostinato.launch.policy import write_policy
from ostinato.model.base import Base
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel, Work
from ostinato.model.lora import Adapters
from ostinato.observe.ledger import Ledger, SteadyClock, Terms
from ostinato.pipeline.account import make_evaluation_work
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.evaluate import Evaluation, evaluate_groups
from ostinato.pipeline.loop import Finish, Finished, Loop, LoopState, Plan
from ostinato.pipeline.signals import Abandoned, SignalRelay, StopSignals
from ostinato.pipeline.state import Observer
from ostinato.protocols import Engine, MetricWriter, RestorableTrainer, Timed
from ostinato.run import GREEDY_SET, MAIN_SET, RunFolder, atomic_folder, to_json
from ostinato.train.checkpoint import Checkpoint, find_oldest_step, repair_folder, save_checkpoint
from ostinato.types import Prompt, Sampling

logger = logging.getLogger(__name__)


def new_evaluations(inputs: RunInputs) -> list[Evaluation]:
    """Make the evaluations of a run: the main one; one greedy answer to each of its prompts before and after
    training, unless the main one is greedy; then the downstream ones, in the order of the recipe."""
    recipe, main, rollout = inputs.recipe, inputs.recipe.eval, inputs.recipe.rollout
    interrupt_limit = rollout.interrupt_after[1:]
    sampling = Sampling(
        temperature=main.temperature,
        # rollout.max_tokens is not used with interrupted thinking, so it is not in the set's identity
        max_tokens=interrupt_limit[0] + rollout.answer_tokens if interrupt_limit else rollout.max_tokens,
        stop_tokens=inputs.renderer.stop_tokens,
        stop_strings=rollout.stop,
    )
    sampled = Evaluation(
        name=MAIN_SET,
        split=main.split,
        prompts=inputs.eval_prompts,
        sampling=sampling,
        samples=main.k,
        k=main.k,
        solved_at=find_solved_at(recipe),
        seed=recipe.seed,
        weights=recipe.engine.weights if has_own_weights(recipe) else "model",
        every=Every.parse(main.every, "every"),
        budget=Every.parse(recipe.trainer.budget, "trainer.budget"),
        shares=main.shares,
        start_factor=main.start_factor,
        rules=dump_rules(recipe),
    )
    evaluations = [sampled]
    if sampling.temperature:
        greedy = replace(sampled, name=GREEDY_SET, sampling=replace(sampling, temperature=0.0), shares=())
        evaluations.append(replace(greedy, samples=1, k=1, start_factor=1, every=NEVER))
    for name, rows in inputs.downstream.items():
        section = main.downstream[name]
        evaluation = replace(
            sampled, name=name, split=section.split, prompts=rows, samples=section.k, k=section.k, shares=()
        )
        evaluations.append(replace(evaluation, every=Every.parse(section.every, "every")))
    return evaluations


async def score_exported_policy(
    inputs: RunInputs, adapters: Adapters | None, state: LoopState, ledger: Ledger
) -> dict[str, Any]:
    """Score the policy as exported on the main held-out set, with a new engine of the model's weights, and
    add the cost to the ledger. Returns the row, which is not yet in eval.jsonl."""
    section = inputs.recipe.engine.model_copy(update={"weights": "model"})
    exact = replace(inputs, recipe=inputs.recipe.model_copy(update={"engine": section}))
    engine = new_engine(exact.recipe, exact.decoder, exact.renderer, need=compute_rollout_need(exact))
    engine.publish(adapters, state.step)
    stage, main = new_stage(exact, engine, exact.grader), new_evaluations(exact)[0]
    with ledger.mark_evaluation():
        row, groups = await evaluate_groups(stage, main, state.step)
    work = make_evaluation_work(groups, new_flops(exact, adapters))
    ledger.evaluation(state.step, "exported", row["seconds"], work)
    return row | {"exported": True, "spent": spent_in_steps(state.step, state.totals)}


def new_budget(section: TrainerSection) -> Every:
    """Return the budget at which this start of the run ends: trainer.until of trainer.budget."""
    return Every.parse(section.budget, "trainer.budget").part(section.until)


def find_solved_at(recipe: Recipe) -> float:
    """Find the least reward of a solved answer, which is the same for all tasks of a mixture."""
    return compute_solved_at(recipe.judges(next(iter(recipe.task.by_name))))


def new_flops(inputs: RunInputs, adapters: Adapters | None) -> FlopModel:
    """Make the FLOP model of rollouts and training."""
    return inputs.decoder.flops(
        adapters.spec if adapters else None,
        recompute=inputs.recipe.trainer.recompute,
        entropy_gradient=inputs.algorithm.needs_entropy,
    )


def new_loop(
    inputs: RunInputs,
    components: RunComponents,
    run: RunFolder,
    state: LoopState,
    *,
    ledger: Ledger,
    observer: Observer,
    writers: Sequence[MetricWriter] = (),
) -> Loop:
    """Make the loop of a run from its inputs and components."""
    recipe, trainer, memory = inputs.recipe, components.trainer, components.memory
    flops, rows = new_flops(inputs, trainer.adapters()), digest_rows(inputs)

    def save(state: LoopState) -> int:  # returns the oldest step of a checkpoint
        counts = {"trainer": trainer.counters(), "loop": state.to_json(), "rows": rows}
        tensors, identity = trainer.tensors(), trainer.identity()
        checkpoint = Checkpoint(step=state.step, tensors=tensors, state=counts, identity=identity)
        save_checkpoint(run.checkpoints, checkpoint, keep=recipe.trainer.keep_checkpoints)
        if memory is not None:
            save_history(memory.history, run.history)
        return find_oldest_step(run.checkpoints)

    def keep_weights(step: int) -> None:
        with atomic_folder(run.scored / f"step-{step:08d}") as folder:
            write_policy(inputs.decoder, trainer.adapters(), inputs.folder, folder, recipe.model.path)

    return Loop(
        plan=Plan(
            recipe=recipe,
            answer_tokens=find_longest_answer(recipe.rollout, inputs.renderer)[0]
            * max(task.max_turns for task in recipe.task.by_name.values()),
            solved_at=find_solved_at(recipe),
            budget=new_budget(recipe.trainer),
            flops=flops,
            peak_flops=find_peak_flops(inputs.decoder),
        ),
        stage=new_stage(inputs, components.engine, inputs.grader),
        tasks=new_tasks(inputs),
        trainer=trainer,
        algorithm=inputs.algorithm,
        folder=run,
        state=state,
        evaluations=new_evaluations(inputs),
        observer=observer,
        workers=components,
        relay=components.relay,
        writers=writers,
        ledger=ledger,
        counters=(inputs.grader.counters, inputs.tool_counters, *components.counters),
        span_sources=components.span_sources,
        worker=components.loop_worker,
        forgetting=new_forgetting(inputs, trainer, run, flops),
        drafting=components.drafting,
        save=save,
        keep=keep_weights if recipe.eval.keep_weights else lambda step: None,
    )


TRAINING_ROWS, HELD_OUT_ROWS = "to train on", "held out"


def digest_rows(inputs: RunInputs) -> dict[str, str]:
    """Hash (twelve hex digits) the rows that a run trains on, and the rows that it is scored on."""
    scored = [*inputs.eval_prompts, *(row for rows in inputs.downstream.values() for row in rows)]
    return {TRAINING_ROWS: _digest(inputs.train_prompts), HELD_OUT_ROWS: _digest(scored)}


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        contents = [prompt.text, prompt.messages, prompt.tools, prompt.template_kwargs]
        digest.update(to_json({"row": [prompt.uid, prompt.task, *contents, prompt.columns]}).encode())
    return digest.hexdigest()[:12]


def check_rows(
    run: RunFolder, saved: Mapping[str, str] | None, digests: Mapping[str, str], changed: Set[str]
) -> None:
    """Raises ValueError if the rows' ``digests`` differ from ``saved``, those of the checkpoint. A warning is
    logged instead if a section of the recipe that chooses the rows is in ``changed``. Nothing is compared if
    ``saved`` is None, in a checkpoint of an older version."""
    if saved is None:
        logger.info(f"{run.path} has no digest of its rows, so they are not compared with those of its start")
        return
    sections = {TRAINING_ROWS: {"task"}, HELD_OUT_ROWS: {"task", "eval"}}  # that choose the rows
    for kind in digests:
        if saved.get(kind) == digests[kind]:
            continue
        if changed & sections[kind]:
            logger.warning(f"the rows {kind} are from here on not those that {run.path} began with")
        else:
            raise ValueError(
                f"the rows {kind} are not those that {run.path} began with; give task.source the same rows, "
                "or start a new run; to go on with these, name them: "
                f"ostinato resume {run.path} task.source=..."
            )


def restore_run(
    run: RunFolder, trainer: RestorableTrainer, inputs: RunInputs, changed: Set[str] = frozenset()
) -> LoopState:
    """Restore ``trainer`` from the newest whole checkpoint of ``run``, if any, and return the loop's state.
    Deletes files that a killed process left half written, so only the holder of the run's lock may call it.
    ``changed``: sections of the recipe. Raises ValueError for other rows (see ``check_rows``) or another
    base, and RunFailed if all checkpoints are damaged."""
    repair_folder(run.checkpoints)
    checkpoint = load_newest_checkpoint(run, trainer)
    if checkpoint is None:
        logger.info(f"{run.path} has no checkpoint, so the run begins again")
        return LoopState()
    check_rows(run, checkpoint.state.get("rows"), digest_rows(inputs), changed)
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    return LoopState(**checkpoint.state["loop"])


def new_ledger(
    recipe: Recipe,
    run: RunFolder,
    decoder: Base,
    clock: SteadyClock,
    pools: Mapping[str, int] | None = None,
) -> Ledger:
    """Make the ledger of one process, which started with ``clock``. ``pools``: devices by pool if workers
    have them, else the recipe's devices."""
    section = recipe.ledger
    terms = Terms(
        devices=sum(pools.values()) if pools else section.devices,
        pools=pools or {},
        device=find_device_name(decoder) or "cpu",
        price_per_device_hour=section.price_per_device_hour,
        currency=section.currency,
        recipe=hashlib.sha256(dump_toml(recipe).encode()).hexdigest()[:12],
    )
    return Ledger(folder=run, terms=terms, clock=clock)


def dump_rules(recipe: Recipe) -> str:
    """Return JSON of the settings that decide how answers are made and scored, without prompts, sampling and
    the folders of paths."""
    tree = without_folders(recipe.model_dump(mode="json"), Recipe)
    interruption = ("interrupt_after", "answer_tokens", "interrupt_phrase", "think_end")
    mix = ("mix",) if recipe.task.mix else ()
    keys = {
        "reward": ("functions", "weights"),
        "task": ("tools", "max_turns", *mix),
        "rollout": interruption if recipe.rollout.interrupt_after else (),
    }
    return json.dumps({section: [tree[section][key] for key in names] for section, names in keys.items()})


STATUS_S = 1.0  # between two writings of workers.json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """The parts that a loop works with; it is the loop's ``Workers``. ``run`` awaits ``ready`` before the
    loop and ``end`` after it, both in its event loop."""

    trainer: RestorableTrainer
    engine: Engine
    memory: Memory | None = None
    drafting: Drafting | None = None
    counters: Sequence[Counter[str]] = ()  # beside those of the grader and the tools
    extra_metrics: Callable[[], Mapping[str, float]] = dict
    tokens_sampled: Callable[[], float] = lambda: 0.0  # grows while the engine samples
    span_sources: Sequence[Timed] = ()  # workers beside the loop
    loop_worker: str = "trainer"  # worker name of the loop's own time
    pools: Mapping[str, int] = field(default_factory=dict)  # devices by pool; empty for a single process
    lines: Sequence[str] = ()  # lines on the workers for people
    status: Callable[[], Sequence[Mapping[str, Any]]] | None = None  # rows of workers.json
    trainer_consistent: Callable[[], bool] = lambda: False
    ready: Callable[[], Coroutine[Any, Any, None]] | None = None
    end: Callable[[], Awaitable[None]] | None = None
    relay: SignalRelay | None = None  # of signals, where the loop is not in the main thread

    def progress(self) -> float:
        return self.tokens_sampled() + self.trainer.progress

    async def run(self, loop: Loop, folder: Path) -> Finished:
        """Wait for ``ready``, run ``loop`` to its end, and wait for ``end``, also if the loop fails. A signal
        during ``ready`` ends the run without a step. If there is a ``status``, workers.json in ``folder`` has
        the state of the workers meanwhile, and their last one in the end."""
        writer = (
            asyncio.create_task(_rewrite_status(folder / "workers.json", self.status))
            if self.status
            else None
        )
        try:
            if self.ready is not None:
                with StopSignals(0.0, at_once=True) as signals, contextlib.suppress(Abandoned):
                    await signals.run_bounded(self.ready())
                if signals.received is not None:
                    return Finished(state=loop.state, why=Finish.of(signals.received))
            return await loop.run()
        finally:
            if writer is not None and self.status is not None:
                writer.cancel()
                _write_status(folder / "workers.json", self.status())  # their last state, before they end
            if self.end is not None:
                await self.end()


async def _rewrite_status(path: Path, status: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
    """Write the status every STATUS_S seconds, until cancelled."""
    while True:
        _write_status(path, status())
        await asyncio.sleep(STATUS_S)


def _write_status(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace ``path`` by the rows as JSON. They are not flushed to disk, as they are of no use after the
    process, and errors of the file system are ignored."""
    temporary = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):  # a full disk is reported by the loop
        temporary.write_text(json.dumps(list(rows)))
        temporary.replace(path)


def introduce_run(
    inputs: RunInputs, components: RunComponents, path: Path, threads: Threads
) -> Iterator[str]:
    """Yield lines that describe the run before it starts: what it works with, its caveats and warnings."""
    recipe, decoder, adapters = inputs.recipe, inputs.decoder, components.trainer.adapters()
    yield f"run folder   {path}"
    yield f"threads      {threads}"
    num_weights = sum(parameter.numel() for parameter in decoder.parameters())
    if isinstance(decoder, Decoder):
        num_weights += sum(math.prod(weight.shape) for weight in decoder.quantised.values())
    token_work = Work(tokens=1, logits=1)  # 2 FLOPs for each weight that the token is multiplied with
    num_active = decoder.flops(None).forward(token_work) / 2
    yield (
        f"model        {recipe.model.path}: {decoder.config.model_type}, {num_weights / 1e6:.1f} M "
        f"parameters, {num_active / 1e6:.1f} M active, {recipe.model.dtype} on {decoder.device.type}"
    )
    if isinstance(decoder, TransformersModel):
        rows = "packed, prompts shared" if decoder.packs else "one sequence a pass"
        yield f"backend      transformers: {rows}; prompts of one length sampled together (docs/models.md)"
    num_trained = adapters.num_parameters if adapters else num_weights
    size_text = f"{num_trained / 1e6:.2f} M" if num_trained > 1e4 else str(num_trained)
    yield f"training     {recipe.adapter.kind}, {size_text} parameters"
    algo = inputs.algorithm
    user_keys = ", ".join(f"{key}={getattr(algo, key)}" for key in algo.overridden)
    yield f"algorithm    {algo.name}" + (f" with your {user_keys}" if user_keys else "")
    if algo.needs_teacher:
        teacher = (recipe.teacher.model, recipe.teacher.adapter, recipe.teacher.url)
        yield f"teacher      {' with '.join(filter(None, teacher))}"
    if algo.correction is not Correction.NONE:
        bounds = f"{algo.correction_low:g} to {algo.correction_high:g}"
        yield f"correction   {algo.correction} of the ratio trainer / sampler, {bounds}"
    num_train, num_held_out = len(inputs.train_prompts), len(inputs.eval_prompts)
    downstream = "".join(f", {len(rows)} of {name}" for name, rows in inputs.downstream.items())
    overlong = f"; {inputs.num_overlong} left out as too long" if inputs.num_overlong else ""
    sources = [
        f"{name} ({task.rows_from})" if name else task.rows_from for name, task in recipe.task.by_name.items()
    ]
    yield (
        f"tasks        {', '.join(sources)}: {num_train} to train on, {num_held_out} held out{downstream}"
        f"{overlong}"
    )
    if inputs.isolation_gaps:
        gaps = " and ".join(inputs.isolation_gaps)
        yield f"rewards      can {gaps} on this machine (reward.isolation, docs/security.md)"
    moe = decoder.num_moe_layers > 0
    yield from (f"note         {caveat}" for caveat in list_caveats(recipe, algo, moe=moe))
    yield from (f"warning      {warning}" for warning in inputs.warnings)
    yield from components.lines
