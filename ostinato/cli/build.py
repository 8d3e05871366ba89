"""A recipe becomes components: here, and only here, concrete classes meet.

    prepare    model, tokenizer, prompts, rewards; everything that can be wrong in a recipe is found here
    new_loop   the run, from what was prepared, and from the trainer and the engine (``parts``, ``cluster``)

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
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ostinato.algo.offpolicy import Correction
from ostinato.cli.caveats import caveats, own_weights
from ostinato.cli.drafts import Memory, save_history
from ostinato.cli.evaluations import downstream_prompts, evaluations
from ostinato.cli.forecast import new_forecaster
from ostinato.cli.graders import new_grader
from ostinato.cli.models import load_decoder, newest_checkpoint
from ostinato.cli.parts import Say, check, new_engine, shares
from ostinato.cli.solved import check_solvable, solved_at
from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.env.dialogue import Dialogue, resolve_tools
from ostinato.env.tasks import Rows, check_disjoint, load_tasks
from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel, Work
from ostinato.model.lora import Adapters
from ostinato.model.named import model_folder
from ostinato.observe.ledger import Ledger
from ostinato.pipeline.account import evaluation_work
from ostinato.pipeline.evaluate import Evaluation, evaluate_groups, spent_in_steps
from ostinato.pipeline.feed import Late
from ostinato.pipeline.loop import Loop, LoopState, Plan
from ostinato.pipeline.remember import Drafting
from ostinato.protocols import Engine, Grader
from ostinato.render import Renderer
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.play import Stage
from ostinato.run import RunFolder
from ostinato.train.checkpoint import Checkpoint, mend, oldest_step, save_checkpoint
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Prompt, Sampling

if TYPE_CHECKING:
    from ostinato.cli.crew import Crew


class ClosingGrader(Grader, Protocol):
    """One that counts what it meets, and has processes to end."""

    counters: Counter[str]

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run or an evaluation is played with."""

    recipe: Recipe
    folder: Path  # of the base model
    decoder: Decoder
    renderer: Renderer
    grader: ClosingGrader
    train_prompts: Sequence[Prompt]  # empty for an evaluation
    eval_prompts: Sequence[Prompt]
    downstream: Mapping[str, Sequence[Prompt]]  # by name of the set
    tool_counters: Counter[str] = dataclasses.field(default_factory=Counter)
    left_open: Sequence[str] = ()  # what reward.isolation cannot prevent on this machine, in words
    warnings: Sequence[str] = ()  # of the dry run of rewards; a sentence, and lines under it

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *exception: object) -> None:
        self.grader.close()


def prepare(recipe: Recipe, *, training: bool) -> Prepared:
    """Load what the recipe names and find what is wrong with it. A context: it ends the reward workers."""
    check(recipe)
    check_solvable(recipe.reward)
    folder = model_folder(recipe.model.path)
    renderer = Renderer(folder)
    train_prompts = prompts(recipe, "train", recipe.task.n_train or None) if training else []
    eval_prompts = prompts(recipe, recipe.eval.split, recipe.eval.n)
    if training and recipe.eval.split == "eval":
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
    return Prepared(
        recipe=recipe,
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
        solved_at=solved_at(prepared.recipe.reward),
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
        overlap=recipe.pipeline.overlap,
        late=Late(recipe.pipeline.late),
        watch_s=recipe.pipeline.watch_s,
        seed=recipe.seed,
        solved_at=solved_at(recipe.reward),
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


def new_loop(prepared: Prepared, crew: Crew, run: RunFolder, state: LoopState, **callbacks: Any) -> Loop:
    """The run, assembled; ``callbacks`` are the loop's writers, ledger, on_step, on_eval and on_note."""
    recipe, trainer, memory = prepared.recipe, crew.trainer, crew.memory
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
        stage=new_stage(prepared, crew.engine, prepared.grader),
        tasks=Rows(prepared.train_prompts, seed=recipe.task.seed),
        trainer=trainer,
        algorithm=check(recipe),
        folder=run,
        state=state,
        evaluations=new_evaluations(prepared),
        foresee=new_forecaster(recipe, run, callbacks.get("writers", ()), callbacks.get("on_note", print)),
        counters=(prepared.grader.counters, prepared.tool_counters, *crew.counters),
        figures=crew.figures,
        timed=crew.timed,
        worker=crew.loop_worker,
        sampled=lambda: crew.sampled() + trainer.progress,
        drafting=crew.drafting,
        save=save,
        whole=crew.whole,
        **callbacks,
    )


def new_drafting(memory: Memory, engine: LocalEngine) -> Drafting:
    """The books of drafts, and what remembers the answers for the next ones."""
    history = memory.history
    return Drafting(
        store=history, lengths=history.lengths, drafter=memory.drafter, meter=engine, past=memory.past
    )


def restore(run: RunFolder, trainer: PolicyTrainer, say: Say) -> LoopState:
    """Put ``trainer`` where the newest whole checkpoint of ``run`` was taken; the start without one. What a
    killed process left half written goes: only for whoever holds the lock of the run."""
    mend(run.checkpoints)
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
    if prepared.left_open:
        can = " and ".join(prepared.left_open)
        yield f"rewards      can {can} on this machine (reward.isolation, docs/security.md)"
    moe = decoder.num_moe_layers > 0
    yield from (f"note         {caveat}" for caveat in caveats(recipe, chosen, moe=moe))
    yield from (f"warning      {warning}" for warning in prepared.warnings)
