"""A recipe becomes components: here, and only here, concrete classes meet.

    check      what needs no model: the algorithm's keys, the size of a group
    prepare    model, tokenizer, prompts, rewards; everything that can be wrong in a recipe is found here
    trainer, engine, loop      the parts of a run, from what was prepared

Everything raises ValueError with one sentence for what the user can mend, before any work starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato.algo.advantages import check_group_size
from ostinato.algo.algorithms import Algorithm, Anchor, Loss, algorithm
from ostinato.algo.offpolicy import Correction
from ostinato.cli.drafts import Memory, save_history
from ostinato.cli.evaluations import downstream_prompts, evaluations
from ostinato.cli.forecast import new_forecaster
from ostinato.cli.models import adapter_spec, load_decoder, newest_checkpoint
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.env.dialogue import Dialogue, resolve_tools
from ostinato.env.tasks import Rows, check_disjoint, load_tasks
from ostinato.ledger import Ledger
from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel, Work
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.named import model_folder
from ostinato.model.native import Kernels
from ostinato.model.native import load as load_kernels
from ostinato.model.native.build import BuildError
from ostinato.model.ops import TORCH_OPS
from ostinato.model.peft_io import load_peft
from ostinato.model.quantise import Weights, own_bytes, quantise
from ostinato.pipeline.account import evaluation_work
from ostinato.pipeline.evaluate import Evaluation, evaluate_groups, spent_in_steps
from ostinato.pipeline.loop import Loop, LoopState, Plan
from ostinato.pipeline.remember import Drafting
from ostinato.protocols import Engine, Grader
from ostinato.render import Renderer
from ostinato.reward.workers import WorkerGrader
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.play import Stage
from ostinato.run import RunFolder
from ostinato.train.checkpoint import Checkpoint, oldest_step, save_checkpoint
from ostinato.train.optimizer import OptimizerSettings, Schedule
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Microbatch, Prompt, Sampling

Say = Callable[[str], None]


def check(recipe: Recipe) -> Algorithm:
    """The algorithm that the recipe asks for, checked against the rest of it."""
    chosen = algorithm(recipe.algo.name, **recipe.algo.overrides)
    try:
        check_group_size(recipe.rollout.group_size, chosen.baseline, chosen.scale, chosen.drop_zero_variance)
    except ValueError as error:
        raise ValueError(f"rollout.group_size: {error}") from error
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run or an evaluation is played with."""

    recipe: Recipe
    folder: Path  # of the base model
    decoder: Decoder
    renderer: Renderer
    grader: WorkerGrader
    train_prompts: Sequence[Prompt]  # empty for an evaluation
    eval_prompts: Sequence[Prompt]
    downstream: Mapping[str, Sequence[Prompt]]  # by name of the set
    tool_counters: Counter[str] = dataclasses.field(default_factory=Counter)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *exception: object) -> None:
        self.grader.close()


def prepare(recipe: Recipe, *, training: bool) -> Prepared:
    """Load what the recipe names and find what is wrong with it. A context: it ends the reward workers."""
    check(recipe)
    folder = model_folder(recipe.model.path)
    renderer = Renderer(folder)
    train_prompts = prompts(recipe, "train", recipe.task.n_train or None) if training else []
    eval_prompts = prompts(recipe, recipe.eval.split, recipe.eval.n)
    if training and recipe.eval.split == "eval":
        check_disjoint(train_prompts, eval_prompts)
    downstream = downstream_prompts(recipe, train_prompts)
    scored = [*eval_prompts, *(prompt for each in downstream.values() for prompt in each)]
    decoder = load_decoder(recipe.model, folder)
    check_lengths(recipe, [*train_prompts, *scored], renderer, decoder.config.max_positions)
    grader = WorkerGrader(
        list(recipe.reward.functions),
        weights=list(recipe.reward.weights) or None,
        timeout_s=recipe.reward.timeout_s,
        workers=recipe.reward.workers,
    )
    try:
        for prompts_of_set in (eval_prompts, *downstream.values()):
            grader.check(prompts_of_set[0])
    except BaseException:
        grader.close()
        raise
    return Prepared(
        recipe=recipe,
        folder=folder,
        decoder=decoder,
        renderer=renderer,
        grader=grader,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        downstream=downstream,
    )


def prompts(recipe: Recipe, split: str, n: int | None) -> list[Prompt]:
    task = recipe.task
    return load_tasks(task.source, split, task.seed, n, task.params, task.system_prompt)


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


def new_adapters(recipe: Recipe, decoder: Decoder) -> Adapters | None:
    """Those at adapter.path, or fresh ones; for adapter.kind = "full" None, and the decoder is trainable."""
    if recipe.adapter.path:
        return load_peft(Path(recipe.adapter.path).expanduser(), decoder)
    if recipe.adapter.kind == "lora":
        return init_adapters(decoder.config, adapter_spec(recipe.adapter), recipe.seed, decoder.device)
    if recipe.model.dtype != "float32":
        raise ValueError(
            f'model.dtype is "{recipe.model.dtype}" with adapter.kind "full", which trains fp32 parameters; '
            'use model.dtype="float32" or adapter.kind="lora"'
        )
    decoder.trainable(True)
    return None


def new_trainer(
    recipe: Recipe,
    decoder: Decoder,
    adapters: Adapters | None,
    on_refused: Callable[[Microbatch], None] | None = None,
) -> PolicyTrainer:
    settings = recipe.trainer
    beta1, beta2 = settings.betas
    return PolicyTrainer(
        decoder,
        adapters,
        check(recipe),
        optimizer=OptimizerSettings(
            lr=settings.lr,
            betas=(beta1, beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            schedule=Schedule(settings.schedule),
            warmup_steps=settings.warmup_steps,
            total_steps=settings.steps,
        ),
        temperature=recipe.rollout.temperature,
        replay=settings.replay,
        replay_threshold=settings.replay_threshold,
        measure_every=recipe.log.mismatch_every,
        recompute=settings.recompute,
        max_refused=settings.max_refused_in_a_row,
        on_refused=on_refused,
        ops=found.training if (found := kernels(recipe, decoder, lambda line: None)) else TORCH_OPS,
    )


def new_engine(
    recipe: Recipe, decoder: Decoder, renderer: Renderer, say: Say, memory: Memory | None = None
) -> LocalEngine:
    """The in-process engine, serving the base, on the decoder's own tensors or a copy (``engine.weights``);
    with drafts from ``memory``."""
    found = kernels(recipe, decoder, say)
    return LocalEngine(
        sampler_decoder(recipe, decoder, found, say),
        kernels=found,
        decode=renderer.decode,
        kv_memory_mb=recipe.engine.kv_memory_mb,
        max_batch=recipe.engine.max_batch,
        context_limit=decoder.config.max_positions,
        drafter=memory.drafter if memory else None,
        leaves=recipe.draft.leaves,
        expect=memory.expect if memory else None,
    )


def sampler_decoder(recipe: Recipe, decoder: Decoder, kernels: Kernels | None, say: Say) -> Decoder:
    """What the engine samples from (``engine.weights``); ``say`` hears what a copy costs."""
    weights = Weights(recipe.engine.weights)
    sampler = quantise(decoder, weights)
    if sampler is not decoder:
        own, model = (size / 1e6 for size in (own_bytes(sampler, decoder), own_bytes(decoder)))
        slow = "" if kernels and kernels.fast_codes else "; on this machine they save memory and cost time"
        say(f"engine weights {weights}: {own:,.0f} MB beside the model's {model:,.0f} MB{slow}")
    return sampler


def kernels(recipe: Recipe, decoder: Decoder, say: Say) -> Kernels | None:
    """The native kernels where they are wanted and can be had; torch does the work otherwise, and says so."""
    if not recipe.engine.native or decoder.device.type != "cpu":
        return None
    try:
        return load_kernels()
    except BuildError as error:
        say(f"native kernels are not used: {error}")
        return None


def new_stage(prepared: Prepared, engine: Engine, grader: Grader) -> Stage:
    recipe = prepared.recipe
    return Stage(
        engine=engine,
        env=environment(recipe, prepared.renderer, prepared.tool_counters),
        grader=grader,
        sampling=Sampling(
            temperature=recipe.rollout.temperature,
            top_k=recipe.rollout.top_k,
            top_p=recipe.rollout.top_p,
            min_p=recipe.rollout.min_p,
            max_tokens=recipe.rollout.max_tokens,
            stop_tokens=prepared.renderer.stop_tokens,
            stop_strings=recipe.rollout.stop,
        ),
        context_limit=prepared.decoder.config.max_positions,
        interruption=new_interruption(recipe, prepared.renderer),
        identity=stage_identity(recipe),
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
    recipe: Recipe, renderer: Renderer, counters: Counter[str] | None = None
) -> Callable[[Prompt], Dialogue]:
    """A fresh episode per prompt: one turn, or a conversation with tools, whose calls ``counters`` counts."""
    tools, turns = resolve_tools(recipe.task.tools), recipe.task.max_turns
    return lambda prompt: Dialogue(prompt, renderer, tools=tools, max_turns=turns, counters=counters)


def new_evaluations(prepared: Prepared) -> list[Evaluation]:
    """The main one first."""
    return evaluations(
        prepared.recipe,
        prepared.eval_prompts,
        prepared.downstream,
        stop_tokens=prepared.renderer.stop_tokens,
        solved_at=solved_at(prepared.recipe),
        weights=eval_weights(prepared.recipe),
    )


def eval_weights(recipe: Recipe) -> str:
    """Whose weights the run's held-out scores are of: "model", or those of a sampler with its own."""
    return recipe.engine.weights if own_weights(recipe) else "model"


async def score_exported(
    prepared: Prepared, adapters: Adapters | None, state: LoopState, ledger: Ledger
) -> dict[str, Any]:
    """The held-out row of the policy as it is exported: with the model's weights, whatever the run sampled
    with."""
    sampler = prepared.recipe.engine.model_copy(update={"weights": "model"})
    exact = dataclasses.replace(prepared, recipe=prepared.recipe.model_copy(update={"engine": sampler}))
    engine = new_engine(exact.recipe, exact.decoder, exact.renderer, lambda line: None)
    engine.publish(adapters, state.step)
    stage, main = new_stage(exact, engine, exact.grader), new_evaluations(exact)[0]
    with ledger.work(), ledger.evaluating():
        row, groups = await evaluate_groups(stage, main, state.step)
    work = evaluation_work(groups, new_flops(exact.recipe, exact.decoder.config, adapters))
    ledger.evaluation(state.step, "exported", row["seconds"], work)
    return row | {"exported": True, "spent": spent_in_steps(state.step, state.totals)}


def solved_at(recipe: Recipe) -> float:
    """The reward from which an answer is solved: the recipe's own, or full marks of every function with a
    positive weight."""
    if recipe.reward.solved_at != "full":
        return recipe.reward.solved_at - 1e-6
    weights = recipe.reward.weights or (1.0,) * len(recipe.reward.functions)
    return sum(weight for weight in weights if weight > 0) - 1e-6


def new_plan(recipe: Recipe, flops: FlopModel, answer_tokens: int) -> Plan:
    """``answer_tokens``: of the longest answer of a turn."""
    return Plan(
        steps=recipe.trainer.steps,
        prompts_per_step=recipe.rollout.prompts_per_step,
        group_size=recipe.rollout.group_size,
        answer_tokens=answer_tokens * recipe.task.max_turns,
        tokens_per_microbatch=recipe.trainer.tokens_per_microbatch,
        minibatches=recipe.trainer.minibatches,
        staleness=recipe.pipeline.staleness,
        seed=recipe.seed,
        solved_at=solved_at(recipe),
        solved_for_good=recipe.rollout.solved_for_good,
        eval_at_start=recipe.eval.at_start,
        checkpoint_every=recipe.trainer.checkpoint_every,
        trajectories_every=recipe.log.trajectories_every,
        stop_on_collapse=recipe.trainer.stop_on_collapse,
        flops=flops,
    )


def new_flops(recipe: Recipe, config: ModelConfig, adapters: Adapters | None) -> FlopModel:
    """What rows of rollouts and of training cost."""
    return FlopModel.of(
        config,
        adapters.spec if adapters else None,
        recompute=recipe.trainer.recompute,
        entropy_gradient=check(recipe).needs_entropy,
    )


def device_name(decoder: Decoder) -> str:
    """The name of the GPU that the decoder is on; empty on a CPU."""
    return torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else ""


def new_loop(
    prepared: Prepared,
    trainer: PolicyTrainer,
    engine: LocalEngine,
    run: RunFolder,
    state: LoopState,
    memory: Memory | None = None,
    **callbacks: Any,
) -> Loop:
    """The run, assembled; ``memory`` is what ``engine`` drafts from, ``callbacks`` are the loop's writers,
    on_step, on_eval and on_note."""
    recipe = prepared.recipe
    flops = new_flops(recipe, prepared.decoder.config, trainer.adapters())

    def save(state: LoopState) -> int:
        checkpoint = Checkpoint(
            step=state.step,
            tensors=trainer.tensors(),
            state={"trainer": trainer.counters(), "loop": state.to_json()},
            identity=trainer.identity(),
        )
        save_checkpoint(run.checkpoints, checkpoint, keep=recipe.trainer.keep_checkpoints)
        if memory is not None:
            save_history(memory.history, run.history, callbacks.get("on_note", lambda note: None))
        return oldest_step(run.checkpoints)

    return Loop(
        plan=new_plan(recipe, flops, longest_answer(recipe, prepared.renderer)[0]),
        stage=new_stage(prepared, engine, prepared.grader),
        tasks=Rows(prepared.train_prompts, seed=recipe.task.seed),
        trainer=trainer,
        algorithm=check(recipe),
        folder=run,
        state=state,
        evaluations=new_evaluations(prepared),
        foresee=new_forecaster(recipe, run, callbacks.get("writers", ()), callbacks.get("on_note", print)),
        counters=(prepared.grader.counters, prepared.tool_counters),
        drafting=new_drafting(memory, engine) if memory else None,
        run_ahead=engine.run_ahead if memory and recipe.draft.run_ahead else None,
        save=save,
        **callbacks,
    )


def new_drafting(memory: Memory, engine: LocalEngine) -> Drafting:
    """The books of drafts, and what remembers the answers for the next ones."""
    history = memory.history
    return Drafting(
        store=history, lengths=history.lengths, drafter=memory.drafter, meter=engine, past=memory.past
    )


def restore(run: RunFolder, trainer: PolicyTrainer, say: Say) -> LoopState:
    """Put ``trainer`` where the newest whole checkpoint of ``run`` was taken; the start without one."""
    checkpoint = newest_checkpoint(run, trainer, say)
    if checkpoint is None:
        say(f"{run.path} has no checkpoint, so the run begins again")
        return LoopState()
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    return LoopState(**checkpoint.state["loop"])


def introduction(prepared: Prepared, adapters: Adapters | None) -> Iterator[str]:
    """What is about to run, in a few lines; the keys of the algorithm that are the user's by name."""
    recipe, decoder = prepared.recipe, prepared.decoder
    size = sum(parameter.numel() for parameter in decoder.parameters())
    a_token = Work(tokens=1, logits=1)  # 2 FLOPs for each weight that it meets
    active = FlopModel.of(decoder.config, None).forward(a_token) / 2
    yield (
        f"model        {recipe.model.path}: {decoder.config.model_type}, {size / 1e6:.1f} M parameters, "
        f"{active / 1e6:.1f} M active, {recipe.model.dtype} on {decoder.device.type}"
    )
    trained = adapters.num_parameters if adapters else size
    yield f"training     {recipe.adapter.kind}, {trained / 1e6:.2f} M parameters"
    chosen = check(recipe)
    yours = ", ".join(f"{key}={getattr(chosen, key)}" for key in chosen.overridden)
    yield f"algorithm    {chosen.name}" + (f" with your {yours}" if yours else "")
    if chosen.correction is not Correction.NONE:
        bounds = f"{chosen.correction_low:g} to {chosen.correction_high:g}"
        yield f"correction   {chosen.correction} of the ratio trainer / sampler, {bounds}"
    train, held_out = len(prepared.train_prompts), len(prepared.eval_prompts)
    further = "".join(f", {len(rows)} of {name}" for name, rows in prepared.downstream.items())
    yield f"tasks        {recipe.task.source}: {train} to train on, {held_out} held out{further}"
    moe = decoder.num_moe_layers > 0
    yield from (f"note         {caveat}" for caveat in caveats(recipe, chosen, moe=moe))


def caveats(recipe: Recipe, chosen: Algorithm, *, moe: bool = True) -> Iterator[str]:
    """What is allowed and is not exact, or not what it seems, one sentence each."""
    rollout, settings = recipe.rollout, recipe.trainer
    filters = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    if used := " and ".join(f"rollout.{name}" for name, on in filters.items() if on):
        yield (
            f"{used} cut what is sampled from: log-probabilities, entropy and gradients are over the tokens "
            "that were kept, which are recorded with each (sampling/support_mean, sampling/support_bytes)"
        )
    yield from _of_weights(recipe)
    if rollout.interrupt_after:
        yield (
            f"rollout.interrupt_after = {list(rollout.interrupt_after)} bounds answers, with "
            f"rollout.answer_tokens = {rollout.answer_tokens}; rollout.max_tokens is not used"
        )
    usual = type(settings).model_fields
    idle = [key for key in ("replay", "replay_threshold") if getattr(settings, key) != usual[key].default]
    if idle and not moe:
        told = " and ".join(f"trainer.{key}" for key in idle)
        yield f"{told} change nothing: {recipe.model.path} has no mixture of experts"
    if moe and settings.replay == "auto" and recipe.log.mismatch_every == 0:
        yield (
            'trainer.replay = "auto" with log.mismatch_every = 0 measures the first step alone, and what it '
            "decides there holds for the whole run"
        )
    if recipe.adapter.path and chosen.needs_reference:
        yield f"algo.kl_coef = {chosen.kl_coef} measures from the base model, not from adapter.path"
    if chosen.loss is Loss.REINFORCE and recipe.trainer.minibatches > 1:
        yield (
            f"algo.loss '{chosen.loss}' has no ratio: of trainer.minibatches = {recipe.trainer.minibatches} "
            "all but the first learn off-policy without a correction"
        )
    if 5 * (first := recipe.pipeline.staleness + 1) > settings.steps and first > 1:
        yield (
            f"pipeline.staleness is {first - 1}: the first {first} of {settings.steps} batches are all "
            "sampled by the policy of the beginning"
        )
    if recipe.pipeline.staleness and uncorrected(chosen):
        yield (
            f"pipeline.staleness is {recipe.pipeline.staleness}, and nothing in {chosen.name} as it is set "
            "corrects for the policy that sampled: batches are trained on as if they were fresh"
        )


def uncorrected(chosen: Algorithm) -> bool:
    """Does no ratio of this algorithm see the policy that sampled?"""
    blind = chosen.loss is Loss.REINFORCE or chosen.anchor is Anchor.TRAINER
    return blind and chosen.correction is Correction.NONE


def _of_weights(recipe: Recipe) -> Iterator[str]:
    """What follows from engine.weights."""
    weights = recipe.engine.weights
    if weights == "model":
        return
    if not own_weights(recipe):
        yield f'engine.weights = "{weights}" changes nothing: the model is in bfloat16 already'
        return
    yield (
        f'engine.weights = "{weights}": the sampler is not quite the policy that is trained; sampling/* in '
        "the metrics says how far it is, and held-out scores are the sampler's, but for one of the exported "
        "policy at the end of the run"
    )


def own_weights(recipe: Recipe) -> bool:
    """Does the sampler compute with weights that are not the trainer's (``model.quantise``)?"""
    same = ("model", "bf16") if recipe.model.dtype == "bfloat16" else ("model",)
    return recipe.engine.weights not in same


def save_refused(folder: Path) -> Callable[[Microbatch], None]:
    """Keep the microbatches of refused steps in ``folder``, numbered, as compressed numpy arrays."""

    def keep(microbatch: Microbatch) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        values = {field.name: getattr(microbatch, field.name) for field in dataclasses.fields(microbatch)}
        arrays: dict[str, Any] = {
            name: value for name, value in values.items() if isinstance(value, np.ndarray)
        }
        if microbatch.support is not None:
            arrays |= {"support_counts": microbatch.support.counts, "support_ids": microbatch.support.ids}
        number = len(list(folder.glob("*.npz")))
        np.savez_compressed(folder / f"{number:04d}.npz", uids=microbatch.uids, **arrays)

    return keep
