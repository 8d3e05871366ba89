"""Supervised training and DPO from a recipe to an adapter: what ``ostinato sft`` does.

    rows -> examples (each used or refused) -> steps on an Accumulator -> checkpoints -> adapter

The run folder is that of ``ostinato train`` without what is sampled: its policy can be served, evaluated,
exported and trained further. Import it after the number of threads is set: it loads torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.config import Recipe, check_files, dump_toml
from ostinato.env.answers import CHATS, example, load_rows, pair
from ostinato.env.tasks import shuffle_order
from ostinato.launch import RunFailed
from ostinato.launch.checks import check, warn_of_control_tokens
from ostinato.launch.device_memory import named_out_of_memory
from ostinato.launch.engine import training_ops
from ostinato.launch.inputs import check_tokens
from ostinato.launch.machine import record_start, resolve_auto
from ostinato.launch.models import facts_of, load_decoder
from ostinato.launch.policy import write_policy
from ostinato.launch.progress import check_writers, open_writers
from ostinato.launch.session import check_steps, new_folder, open_folder
from ostinato.launch.trainer import new_adapters
from ostinato.lock import hold_lock
from ostinato.model.named import model_folder
from ostinato.model.peft_io import base_fingerprint
from ostinato.pipeline.signals import StopSignals, raise_at_sigterm
from ostinato.pipeline.state import Finish
from ostinato.render import Renderer
from ostinato.run import RunFolder
from ostinato.train.accumulate import Accumulator, Adam, NotFinite, Row
from ostinato.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    repair_folder,
    save_checkpoint,
)
from ostinato.train.optimizer import lr_factor
from ostinato.train.supervised import answer_logprobs, make_row, preferences, supervised
from ostinato.train.trainer import identity_of

log = logging.getLogger(__name__)
REFERENCE = "reference.npy"  # of a checkpoint: log-probabilities of the answers before training
LINES = 50  # of progress, in a run
REPORTED = ("loss", "eval_loss", "rewards/margins")

Rows = list[tuple[Row, ...]]  # per example: (row,), or (chosen, rejected)


def supervise(recipe: Recipe, path: Path | None = None) -> tuple[Path, int, str]:
    """Train in a new run folder, or resume the run in ``path``, on CPU to the same bits as without a pause.
    Returns (its folder, finished steps, "done" or the ledger's name of a signal).

    Raises ValueError for what is wrong with the recipe or a row, before any work; RunFailed when the run
    cannot go on."""
    check_files(recipe)
    if path is None:
        with new_folder(recipe) as new:
            return _session(recipe, new, again=False)
    with hold_lock(path):
        RunFolder.open(path).sweep()
        return _session(recipe, path, again=True)


@raise_at_sigterm()
def _session(recipe: Recipe, path: Path, *, again: bool) -> tuple[Path, int, str]:
    """Check the recipe, read its rows, derive the number of steps, and train; returns as ``supervise``."""
    _check(recipe)
    recipe = resolve_auto(recipe, run=path if again else None, warn=True)
    folder = model_folder(recipe.model.path)
    train, held_out = read_rows(recipe, folder)
    if epochs := recipe.sft.epochs:
        steps = math.ceil(epochs * len(train) / recipe.sft.rows_per_step)
        tree = recipe.model_dump()
        recipe = Recipe.parse({**tree, "trainer": {**tree["trainer"], "steps": steps}})
    if again:
        check_steps(RunFolder.open(path), recipe.trainer.steps)
    with named_out_of_memory(recipe, f"to go on: ostinato resume {path}"):
        return _learn(recipe, path, folder, train, held_out, again=again)


def _learn(
    recipe: Recipe, path: Path, folder: Path, train: Rows, held_out: Rows, *, again: bool
) -> tuple[Path, int, str]:
    """Load the model, run all steps, and write the adapter; returns as ``supervise``."""
    decoder = load_decoder(recipe.model, folder)
    adapters = new_adapters(recipe, decoder)
    learner = Accumulator(
        decoder,
        adapters,
        ops=training_ops(recipe, decoder),
        tokens_per_microbatch=recipe.trainer.tokens_per_microbatch,
        recompute=recipe.trainer.recompute,
    )
    base = "" if adapters is None else base_fingerprint(decoder)
    course = _Course(recipe, train, held_out, learner, identity_of(decoder, adapters, base))
    run, mend_it = open_folder(path, dump_toml(recipe), again), f"to go on: ostinato resume {path}"
    record_start(run, train_prompts=len(train))
    log.info(f"run folder   {path}")
    log.info(f"rows         {len(train)} to train on, {len(held_out)} held out")
    try:
        why = asyncio.run(course.run(run, again=again))
        decoder.trainable(False)
        write_policy(decoder, adapters, folder, run.adapter, recipe.model.path)
    except KeyboardInterrupt as stop:
        stop.args = (f"what was saved is in {path}, {mend_it}",)
        raise
    except (NotFinite, CheckpointError, OSError) as error:
        saved = f"what was saved is in {path}, {mend_it}"
        raise RunFailed(f"after step {course.step}: {error}; {saved}") from error
    return path, course.step, why


def _check(recipe: Recipe) -> None:
    """Raises ValueError for keys that supervised training does not support."""
    check(recipe)
    check_writers(recipe.log.writers)
    task = recipe.task
    unread = {"task.mix": task.mix, "task.env": task.env, "task.tools": task.tools}
    unread |= {"task.agent": task.has_agent, "task.system_prompt": task.system_prompt}
    unread |= {"parallel.layout": recipe.parallel.sharded, "eval.keep_weights": recipe.eval.keep_weights}
    if unsupported := [key for key, value in unread.items() if value]:
        raise ValueError(f"{unsupported[0]} is set, and supervised training does without it; leave it out")
    if isinstance(recipe.eval.every, str):
        raise ValueError(f"eval.every is {recipe.eval.every!r}; give it in steps for supervised training")


def read_rows(recipe: Recipe, folder: Path) -> tuple[Rows, Rows]:
    """Examples (to train on, held out). Raises ValueError naming the first row that cannot be trained on."""
    task, turns = recipe.task, recipe.sft.turns
    renderer = Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs)
    config = facts_of(recipe.model, folder)
    context = config.max_positions

    def rows(split: str, n: int | None) -> Rows:
        """At most ``n`` examples of a split, all if None, each checked and tokenized."""
        examples_rows: Rows = []
        named_rows = load_rows(task.source, split, task.seed, n, task.params)
        for location, row in named_rows:
            if recipe.sft.loss == "dpo":
                examples = pair(renderer, row, location, context=context)
            else:
                examples = (example(renderer, row, location, context=context, turns=turns),)
            for item in examples:
                check_tokens(item.tokens, location, renderer, config.vocab_size)
            examples_rows.append(tuple(make_row(item.tokens, item.mask) for item in examples))
        chats = [(location, [row.get(name) for name in CHATS]) for location, row in named_rows]
        chats = [
            (location, [column for column in columns if not isinstance(column, str)])
            for location, columns in chats
        ]
        warn_of_control_tokens(renderer, chats)
        return examples_rows

    scored = recipe.eval.every or recipe.eval.at_start
    return rows("train", task.n_train or None), rows("eval", recipe.eval.n) if scored else []


class _Course:
    """The training loop of a run; ``step`` counts its finished steps."""

    def __init__(
        self, recipe: Recipe, train: Rows, held_out: Rows, learner: Accumulator, identity: dict[str, str]
    ) -> None:
        self.step = 0
        self._recipe, self._learner, self._identity = recipe, learner, identity
        self._rows, self._train = train + held_out, len(train)
        self._settings = recipe.trainer
        self._reference = np.zeros((0, 2))  # [rows, 2], for DPO
        self._digest = hashlib.sha256()
        for row in (row for rows in (self._rows if recipe.sft.loss == "dpo" else train) for row in rows):
            self._digest.update(
                row.tokens.tobytes() + row.targets.tobytes() + row.values["weights"].tobytes()
            )

    async def run(self, run: RunFolder, *, again: bool) -> str:
        """Train until the last step or a signal, and write a checkpoint there; returns "done" or the signal's
        name. A coroutine, as signals are handled in an event loop."""
        recipe, steps, every = self._recipe, self._recipe.trainer.steps, int(self._recipe.eval.every)
        if again:
            self._restore(run)
        if recipe.sft.loss == "dpo" and not len(self._reference):
            # held-out pairs in the batches in which they are scored: packed alike, they have the same bits
            sets = (range(self._train), range(self._train, len(self._rows)))
            parts = [batch for places in sets for batch in self._parts(places)]
            logprobs = [
                answer_logprobs(self._learner, [self._rows[index] for index in batch]) for batch in parts
            ]
            self._reference = np.concatenate(logprobs)
        writers = open_writers(recipe.log.writers, run.path, recipe.model_dump(mode="json"))
        if self.step == 0 and recipe.eval.at_start and (scores := self._held_out()):
            run.metrics.keep(lambda row: row["step"] > 0)  # scores of a start that was killed
            self._say([run, *writers], scores)
        with StopSignals(0.0) as signals:  # a step is always finished
            while self.step < steps and signals.received is None:
                metrics, done = self._learn(), self.step == steps
                if every and (self.step % every == 0 or done):
                    metrics |= self._held_out()
                self._say([run, *writers], metrics)
                checkpoint_every = recipe.trainer.checkpoint_every
                if done or signals.received or (checkpoint_every and self.step % checkpoint_every == 0):
                    self._save(run)
        return "done" if signals.received is None else str(Finish.of(signals.received))

    def _learn(self) -> dict[str, float]:
        """Train one step on the next rows of the seeded order; returns its metrics."""
        settings, section = self._settings, self._recipe.sft
        end = (self.step + 1) * section.rows_per_step
        end = min(end, section.epochs * self._train) if section.epochs else end
        places = (divmod(position, self._train) for position in range(self.step * section.rows_per_step, end))
        indices = [
            int(shuffle_order(self._recipe.seed, epoch, self._train)[place]) for epoch, place in places
        ]
        sums = self._pass(indices, learn=True)
        adam = Adam(
            lr=settings.lr * lr_factor(settings, self.step),
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm if math.isfinite(settings.max_grad_norm) else 0.0,
        )
        step_result = self._learner.optim_step(adam)
        self.step += 1
        return {**_means(sums), **step_result, "num_tokens": sums["tokens"], "epoch": end / self._train}

    def _held_out(self) -> dict[str, float]:
        """Mean metrics over the held-out rows, as ``eval_*``; empty without such rows."""
        sums: dict[str, float] = {}
        for part in self._parts(range(self._train, len(self._rows))):
            for name, value in self._pass(part, learn=False).items():
                sums[name] = sums.get(name, 0.0) + value
        return {f"eval_{name}": value for name, value in _means(sums).items()}

    def _parts(self, places: Sequence[int]) -> list[Sequence[int]]:
        """``places`` in batches of ``sft.rows_per_step``."""
        size = self._recipe.sft.rows_per_step
        return [places[first : first + size] for first in range(0, len(places), size)]

    def _pass(self, chosen: Sequence[int], *, learn: bool) -> dict[str, float]:
        """Sums of metrics over the rows with these indices; with ``learn`` gradients are accumulated."""
        rows, section = [self._rows[index] for index in chosen], self._recipe.sft
        if section.loss == "dpo":
            reference = self._reference[list(chosen)]
            return preferences(self._learner, rows, reference, section.beta, learn=learn)
        return supervised(self._learner, [row for (row,) in rows], learn=learn)

    def _say(self, writers: Sequence[Any], metrics: dict[str, float]) -> None:
        """Write the metrics of a step to all writers, and to the log about LINES times in a run."""
        for writer in writers:
            writer.write(self.step, metrics)
        steps = self._recipe.trainer.steps
        if "eval_loss" in metrics or self.step % max(1, steps // LINES) == 0 or self.step == steps:
            words = [f"{name} {metrics[name]:.4f}" for name in REPORTED if name in metrics]
            log.info(f"step {self.step} of {steps}   {'   '.join(words)}")

    def _save(self, run: RunFolder) -> None:
        reference = io.BytesIO()
        np.save(reference, self._reference)
        trainer = {"steps": self.step, "refused_in_a_row": 0, "num_rows": 0}  # as ``PolicyTrainer`` has it
        checkpoint = Checkpoint(
            step=self.step,
            tensors=self._learner.tensors(),
            state={"trainer": trainer, "rows": self._digest.hexdigest()},
            identity=self._identity,
            files={REFERENCE: reference.getvalue()} if len(self._reference) else {},
        )
        save_checkpoint(run.checkpoints, checkpoint, keep=self._recipe.trainer.keep_checkpoints)

    def _restore(self, run: RunFolder) -> None:
        """Load the last checkpoint, if any, and drop later rows. Raises ValueError if the rows differ."""
        repair_folder(run.checkpoints)
        if (checkpoint := load_checkpoint(run.checkpoints, identity=self._identity)) is not None:
            if checkpoint.state["rows"] != self._digest.hexdigest():
                raise ValueError(
                    f"the rows of task.source {self._recipe.task.source} are not those that {run.path} has "
                    "trained on; give it the same rows, or start a new run"
                )
            self._learner.restore(checkpoint.tensors)
            self.step = checkpoint.step
            if (reference := checkpoint.files.get(REFERENCE)) is not None:
                self._reference = np.load(io.BytesIO(reference))
        run.truncate_after(self.step)


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Each sum divided by "count", without the counts themselves."""
    return {name: total / sums["count"] for name, total in sums.items() if name not in ("count", "tokens")}
