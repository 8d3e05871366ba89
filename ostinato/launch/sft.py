"""Supervised training and DPO from a recipe to an adapter: what ``ostinato sft`` does.

    rows -> examples (each used or refused) -> steps on an Accumulator -> checkpoints -> adapter

The run folder is that of ``ostinato train`` without what is sampled: its policy can be served, evaluated,
exported and trained further. Import it after the number of threads is set, as it loads torch.
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
from ostinato.env.answers import CHATS, encode_example, encode_pair, load_rows
from ostinato.env.tasks import shuffle_order
from ostinato.launch import RunFailed
from ostinato.launch.checks import check_recipe, warn_of_control_tokens
from ostinato.launch.device_memory import name_out_of_memory
from ostinato.launch.engine import choose_training_ops
from ostinato.launch.inputs import check_tokens
from ostinato.launch.machine import record_start, resolve_auto
from ostinato.launch.models import load_decoder, read_facts
from ostinato.launch.policy import write_policy
from ostinato.launch.progress import check_writers, open_writers
from ostinato.launch.session import check_steps, open_new_folder, open_run_folder
from ostinato.launch.trainer import new_adapters
from ostinato.lock import hold_lock
from ostinato.model.named import find_model_folder
from ostinato.model.peft_io import compute_base_fingerprint
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
NUM_LINES = 50  # of progress, in a run
REPORTED = ("loss", "eval_loss", "rewards/margins")

Rows = list[tuple[Row, ...]]  # per example: (row,), or (chosen, rejected)


def train_supervised(recipe: Recipe, path: Path | None = None) -> tuple[Path, int, str]:
    """Train in a new run folder, or resume the run in ``path``, on CPU to the same bits as without a pause.
    Returns (its folder, finished steps, "done" or the ledger's name of a signal).

    Raises ValueError, before any step, for mistakes in the recipe or a row, for a run that another process
    holds, has done more steps, or has trained on other rows; RunFailed if the run cannot go on."""
    check_files(recipe)
    if path is None:
        with open_new_folder(recipe) as new:
            return _run_session(recipe, new, is_resumed=False)
    with hold_lock(path):
        RunFolder.open(path).sweep()
        return _run_session(recipe, path, is_resumed=True)


@raise_at_sigterm()
def _run_session(recipe: Recipe, path: Path, *, is_resumed: bool) -> tuple[Path, int, str]:
    """Check the recipe, read its rows, derive the number of steps, and train; returns as
    ``train_supervised``."""
    _check_recipe(recipe)
    recipe = resolve_auto(recipe, run=path if is_resumed else None, warn=True)
    folder = find_model_folder(recipe.model.path)
    train, held_out = read_rows(recipe, folder)
    if epochs := recipe.sft.epochs:
        steps = math.ceil(epochs * len(train) / recipe.sft.rows_per_step)
        tree = recipe.model_dump()
        recipe = Recipe.parse({**tree, "trainer": {**tree["trainer"], "steps": steps}})
    if is_resumed:
        check_steps(RunFolder.open(path), recipe.trainer.steps)
    with name_out_of_memory(recipe, f"to go on: ostinato resume {path}"):
        return _train(recipe, path, folder, train, held_out, is_resumed=is_resumed)


def _train(
    recipe: Recipe, path: Path, folder: Path, train: Rows, held_out: Rows, *, is_resumed: bool
) -> tuple[Path, int, str]:
    """Load the model, write the recipe and the start to the run folder, run all steps, and write the adapter,
    also after a signal that ends the steps; returns as ``train_supervised``."""
    decoder = load_decoder(recipe.model, folder)
    adapters = new_adapters(recipe, decoder)
    learner = Accumulator(
        decoder,
        adapters,
        ops=choose_training_ops(recipe, decoder),
        tokens_per_microbatch=recipe.trainer.tokens_per_microbatch,
        recompute=recipe.trainer.recompute,
    )
    base = "" if adapters is None else compute_base_fingerprint(decoder)
    loop = _Loop(recipe, train, held_out, learner, identity_of(decoder, adapters, base))
    run, resume_hint = (
        open_run_folder(path, dump_toml(recipe), is_resumed),
        f"to go on: ostinato resume {path}",
    )
    record_start(run, train_prompts=len(train))
    log.info(f"run folder   {path}")
    log.info(f"rows         {len(train)} to train on, {len(held_out)} held out")
    try:
        why = asyncio.run(loop.run(run, is_resumed=is_resumed))
        decoder.set_trainable(False)
        write_policy(decoder, adapters, folder, run.adapter, recipe.model.path)
    except KeyboardInterrupt as stop:
        stop.args = (f"what was saved is in {path}, {resume_hint}",)
        raise
    except (NotFinite, CheckpointError, OSError) as error:
        saved = f"what was saved is in {path}, {resume_hint}"
        raise RunFailed(f"after step {loop.step}: {error}; {saved}") from error
    return path, loop.step, why


def _check_recipe(recipe: Recipe) -> None:
    """Raises ValueError for keys that do not go together or that supervised training does not support, and
    for a writer whose package is missing."""
    check_recipe(recipe)
    check_writers(recipe.log.writers)
    task = recipe.task
    values = {"task.mix": task.mix, "task.env": task.env, "task.tools": task.tools}
    values |= {"task.agent": task.has_agent, "task.system_prompt": task.system_prompt}
    values |= {"parallel.layout": recipe.parallel.sharded, "eval.keep_weights": recipe.eval.keep_weights}
    if unsupported := [key for key, value in values.items() if value]:
        raise ValueError(f"{unsupported[0]} is set, and supervised training does without it; leave it out")
    if isinstance(recipe.eval.every, str):
        raise ValueError(f"eval.every is {recipe.eval.every!r}; give it in steps for supervised training")


def read_rows(recipe: Recipe, folder: Path) -> tuple[Rows, Rows]:
    """Read the examples (to train on, held out; the second is empty if no evaluation is set). Rows that spell
    control tokens are logged. Raises ValueError naming the first row that cannot be trained on."""
    task, turns = recipe.task, recipe.sft.turns
    renderer = Renderer(folder, template_kwargs=recipe.model.chat_template_kwargs)
    config = read_facts(recipe.model, folder)
    context = config.max_positions

    def read_split(split: str, n: int | None) -> Rows:
        """Read at most ``n`` examples of a split, all if None; each is checked and tokenized."""
        examples_rows: Rows = []
        table = load_rows(task.source, split, task.seed, n, task.params)
        for location, row in table:
            if recipe.sft.loss == "dpo":
                examples = encode_pair(renderer, row, location, context=context)
            else:
                examples = (encode_example(renderer, row, location, context=context, turns=turns),)
            for item in examples:
                check_tokens(item.tokens, location, renderer, config.vocab_size)
            examples_rows.append(tuple(make_row(item.tokens, item.mask) for item in examples))
        chats = [(location, [row.get(name) for name in CHATS]) for location, row in table]
        chats = [
            (location, [column for column in columns if not isinstance(column, str)])
            for location, columns in chats
        ]
        warn_of_control_tokens(renderer, chats)
        return examples_rows

    is_scored = recipe.eval.every or recipe.eval.at_start
    return read_split("train", task.n_train or None), read_split("eval", recipe.eval.n) if is_scored else []


class _Loop:
    """The training loop of a run; ``step`` counts its finished steps."""

    def __init__(
        self, recipe: Recipe, train: Rows, held_out: Rows, learner: Accumulator, identity: dict[str, str]
    ) -> None:
        self.step = 0
        self._recipe, self._learner, self._identity = recipe, learner, identity
        self._rows, self._num_train = train + held_out, len(train)  # the held-out rows are the last ones
        self._settings = recipe.trainer
        self._reference = np.zeros((0, 2))  # [rows, 2], for DPO
        self._digest = hashlib.sha256()
        for row in (row for rows in (self._rows if recipe.sft.loss == "dpo" else train) for row in rows):
            self._digest.update(
                row.tokens.tobytes() + row.targets.tobytes() + row.values["weights"].tobytes()
            )

    async def run(self, run: RunFolder, *, is_resumed: bool) -> str:
        """Train until the last step or a signal, with evaluations, and write a checkpoint at the end and
        whenever one is due; returns "done" or the signal's name. If ``is_resumed``, restore the last
        checkpoint first. Raises as ``_restore``. It is a coroutine, as signals are handled in an event
        loop."""
        recipe, steps, every = self._recipe, self._recipe.trainer.steps, int(self._recipe.eval.every)
        if is_resumed:
            self._restore(run)
        if recipe.sft.loss == "dpo" and not len(self._reference):
            # Held-out pairs are in the batches in which they are scored, so that their log-probabilities have
            # the same bits there.
            sets = (range(self._num_train), range(self._num_train, len(self._rows)))
            batches = [batch for indices in sets for batch in self._split_batches(indices)]
            logprobs = [
                answer_logprobs(self._learner, [self._rows[index] for index in batch]) for batch in batches
            ]
            self._reference = np.concatenate(logprobs)
        writers = open_writers(recipe.log.writers, run.path, recipe.model_dump(mode="json"))
        if self.step == 0 and recipe.eval.at_start and (scores := self._score_held_out()):
            run.metrics.keep(lambda row: row["step"] > 0)  # deletes the scores of a start that was killed
            self._write_metrics([run, *writers], scores)
        with StopSignals(0.0) as signals:  # a step is always finished
            while self.step < steps and signals.received is None:
                metrics, is_done = self._train_step(), self.step == steps
                if every and (self.step % every == 0 or is_done):
                    metrics |= self._score_held_out()
                self._write_metrics([run, *writers], metrics)
                checkpoint_every = recipe.trainer.checkpoint_every
                if is_done or signals.received or (checkpoint_every and self.step % checkpoint_every == 0):
                    self._save(run)
        return "done" if signals.received is None else str(Finish.of(signals.received))

    def _train_step(self) -> dict[str, float]:
        """Train one step on the next rows of the seeded order, and count it; returns its metrics."""
        settings, section = self._settings, self._recipe.sft
        end = (self.step + 1) * section.rows_per_step
        end = min(end, section.epochs * self._num_train) if section.epochs else end
        places = (
            divmod(position, self._num_train) for position in range(self.step * section.rows_per_step, end)
        )
        indices = [
            int(shuffle_order(self._recipe.seed, epoch, self._num_train)[place]) for epoch, place in places
        ]
        sums = self._run_rows(indices, learn=True)
        adam = Adam(
            lr=settings.lr * lr_factor(settings, self.step),
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm if math.isfinite(settings.max_grad_norm) else 0.0,
        )
        step_result = self._learner.optim_step(adam)
        self.step += 1
        return {
            **_compute_means(sums),
            **step_result,
            "num_tokens": sums["tokens"],
            "epoch": end / self._num_train,
        }

    def _score_held_out(self) -> dict[str, float]:
        """Compute mean metrics over the held-out rows, as ``eval_*``; empty without such rows."""
        sums: dict[str, float] = {}
        for batch in self._split_batches(range(self._num_train, len(self._rows))):
            for name, value in self._run_rows(batch, learn=False).items():
                sums[name] = sums.get(name, 0.0) + value
        return {f"eval_{name}": value for name, value in _compute_means(sums).items()}

    def _split_batches(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Split ``indices`` into batches of ``sft.rows_per_step``."""
        size = self._recipe.sft.rows_per_step
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    def _run_rows(self, indices: Sequence[int], *, learn: bool) -> dict[str, float]:
        """Compute sums of metrics over the rows with these indices; with ``learn`` add their gradients."""
        rows, section = [self._rows[index] for index in indices], self._recipe.sft
        if section.loss == "dpo":
            reference = self._reference[list(indices)]
            return preferences(self._learner, rows, reference, section.beta, learn=learn)
        return supervised(self._learner, [row for (row,) in rows], learn=learn)

    def _write_metrics(self, writers: Sequence[Any], metrics: dict[str, float]) -> None:
        """Write the metrics of a step to all writers, and log those with a held-out loss, the last ones, and
        about NUM_LINES others."""
        for writer in writers:
            writer.write(self.step, metrics)
        steps = self._recipe.trainer.steps
        if "eval_loss" in metrics or self.step % max(1, steps // NUM_LINES) == 0 or self.step == steps:
            words = [f"{name} {metrics[name]:.4f}" for name in REPORTED if name in metrics]
            log.info(f"step {self.step} of {steps}   {'   '.join(words)}")

    def _save(self, run: RunFolder) -> None:
        """Write a checkpoint, and delete those that trainer.keep_checkpoints does not keep."""
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
        """Restore the newest whole checkpoint, if any. Deletes files that a killed process left half written,
        and rows of later steps. Raises ValueError if the training rows or the base differ, and
        CheckpointError if all checkpoints are damaged."""
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


def _compute_means(sums: dict[str, float]) -> dict[str, float]:
    """Divide each sum by "count"; "count" and "tokens" are left out."""
    return {name: total / sums["count"] for name, total in sums.items() if name not in ("count", "tokens")}
