"""A run from its recipe to its outcome: what ``ostinato train``, ``resume`` and ``ostinato.learn`` do.

    recipe -> threads -> inputs -> run folder -> loop -> adapter -> Outcome

Nothing heavy is imported at the top, as threads have to be chosen before torch is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ostinato.config import Recipe, check_files, dump_toml
from ostinato.config.recipe import merge
from ostinato.failure import NamedFailure
from ostinato.launch import NothingToLearn, RunFailed
from ostinato.launch.machine import configure_threads, record_start, resolve_auto
from ostinato.launch.progress import Monitor, StepCallback, check_writers, open_writers
from ostinato.launch.python import make_recipe
from ostinato.lock import LOCK, hold_lock
from ostinato.observe.ledger import Ledger, SteadyClock
from ostinato.observe.rows import ends, main_scores
from ostinato.pipeline.signals import raise_at_sigterm
from ostinato.run import MAIN_SET, RunFolder, atomic_write, new_run_path
from ostinato.tables import terminal_table
from ostinato.terminal import Screen, announce_work, say, show_log
from ostinato.threads import outside_loop

if TYPE_CHECKING:
    from ostinato.launch.inputs import RunInputs
    from ostinato.launch.shared_base import SharedPlace
    from ostinato.model.lora import Adapters
    from ostinato.pipeline.loop import Finish, Finished


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run. ``before`` and ``after``: rows of eval.jsonl, scored by the sampler, None if not
    measured; ``exported``: the row of the exported policy if the sampler has other weights
    (``engine.weights``)."""

    folder: Path
    step: int  # finished
    why: Finish
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    exported: Mapping[str, Any] | None = None
    greedy: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None)  # before and after

    @classmethod
    def of(cls, recipe: Recipe, run: RunFolder, finished: Finished) -> Outcome:
        """Read the outcome of a finished run from eval.jsonl in its folder."""
        scores = main_scores(list(run.eval.rows()), recipe.model_dump(mode="json"))
        (before, after), exported, step = ends(scores["evals"]), scores["exported"], finished.state.step
        return cls(
            folder=run.path,
            step=step,
            why=finished.why,
            before=before,
            after=after,
            exported=exported if exported and exported["step"] == step else None,
            greedy=ends(scores["greedy"]),
        )

    @property
    def adapter(self) -> Path:
        """Folder of the trained adapter in PEFT's format, or with ``adapter.kind = "full"`` of the model."""
        return RunFolder(self.folder).adapter

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: one per step, with its metrics by TRL's names."""
        return list(RunFolder.open(self.folder).metrics.rows())

    def evals(self) -> list[dict[str, Any]]:
        """The rows of eval.jsonl: one per score of a set."""
        return list(RunFolder.open(self.folder).eval.rows())

    def generate(
        self,
        prompts: str | Sequence[Mapping[str, Any]] | Sequence[str | Sequence[Mapping[str, Any]]],
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int = 0,
        **others: Any,
    ) -> list[str]:
        """The trained policy's answer to each prompt: one or several, each a text, which is what a user says
        where the run's prompts were chats, or the messages of a chat. None: the value in the model's
        generation_config.json. Raises TypeError for ``others``."""
        from ostinato.launch.policy import SamplingOptions, answer_prompts

        if others:
            raise TypeError(
                f"generate has no {min(others)}; it takes max_tokens, temperature, top_p and seed, and gives "
                "one answer to each prompt: for n answers give it n times"
            )
        options = SamplingOptions(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        is_one = isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Mapping))
        prompt_list: Any = [prompts] if is_one else prompts
        return outside_loop(lambda: answer_prompts(str(self.folder), prompt_list, options))

    def show(self) -> None:
        """Print the ten numbers that the page begins with (scores before and after, cost, ...), and where the
        adapter and the page are."""
        from ostinato.observe.figures import tabulate
        from ostinato.observe.rows import RunRows

        screen, data = Screen(), RunRows(RunFolder.open(self.folder)).read()
        screen.print(terminal_table(tabulate(data), screen.width))
        page = self.folder / "report.html"
        report = page if page.exists() else f"ostinato report {self.folder}"
        say(f"adapter      {self.adapter}", f"report       {report}")


WORKERS = "ostinato.launch.workers"  # the module that makes the samplers and trainers of a cluster


def learn(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    env: Any = None,
    agent: Any = None,
    loss: Any = None,
    tools: Any = (),
    on_step: StepCallback | None = None,
    quiet: bool = False,
    workers: str = WORKERS,
    folder: Path | None = None,
    **sections: Any,
) -> Outcome:
    """Train by ``recipe`` (None: the defaults of all keys) from the start, in a new run folder (``folder``,
    empty; None: one under ``log.dir``), as the command ``train`` does.

    Objects take the place of names in the recipe, and further keywords are its sections and keys, as in
    ``learn(model="Qwen/Qwen3-0.6B", data=rows, reward=score, trainer={"steps": 50}, seed=1)``:

    ``data``, ``eval_data``: rows, as a list of dicts or a ``datasets.Dataset``, a dict of both by split, or a
    source by its name; without rows to evaluate on a tenth is held out. ``reward``: one function or several,
    with TRL's arguments. ``model`` and ``reward`` may be dicts of their sections. ``env``: a class.
    ``agent``: as in docs/agents.md. ``loss``: as in ``algo.loss``. ``tools``: functions. ``on_step`` is
    called with every row of metrics; True ends the run after that step. ``workers`` names the module that
    makes samplers and trainers of a cluster, as ``launch.workers`` does.

    Raises ValueError for what is wrong with the recipe, before any work; RunFailed when the run cannot go on.
    """
    recipe = make_recipe(
        recipe,
        overrides,
        model=model,
        data=data,
        eval_data=eval_data,
        reward=reward,
        env=env,
        agent=agent,
        loss=loss,
        tools=tools,
        sections=sections,
    )
    check_files(recipe)
    console = Screen(quiet=quiet)
    with open_new_folder(recipe, folder) as path:
        return outside_loop(lambda: run_session(recipe, path, console, workers=workers, on_step=on_step))


def resume(
    path: Path | str,
    *overrides: str,
    on_step: StepCallback | None = None,
    quiet: bool = False,
    workers: str = WORKERS,
    **sections: Any,
) -> Outcome:
    """Resume the run in ``path`` from its newest whole checkpoint; without one, from the start.

    ``overrides``, and ``sections`` as in ``learn``, change its recipe from here on: ``trainer.steps=200`` or
    ``trainer={"steps": 200}`` trains until the run has 200 steps. ``workers`` is no part of the recipe: other
    ones have to be named again.

    Raises ValueError where another process is at work on the run, and where its rows are not those that it
    began with, unless they are named.
    """
    path = Path(path).absolute()
    run, console = RunFolder.open(path), Screen(quiet=quiet)
    with hold_lock(path):
        run.sweep()
        recipe = merge(Recipe.load(run.recipe, *overrides), sections)
        check_steps(run, recipe.trainer.steps)
        check_files(recipe)
        changed = {override.partition(".")[0] for override in overrides} | sections.keys()
        return outside_loop(
            lambda: run_session(recipe, path, console, changed=changed, workers=workers, on_step=on_step)
        )


def check_steps(run: RunFolder, steps: int) -> None:
    """Raises ValueError if the run has already done more than ``steps``; logs it if none is left to do."""
    from ostinato.train.checkpoint import find_newest_step

    if (finished := find_newest_step(run.checkpoints)) > steps:
        raise ValueError(
            f"trainer.steps is {steps}, and {run.path} has done {finished} steps; give it {finished} or more"
        )
    if finished == steps:
        logger.info(f"all {steps} steps are done and nothing is left; trainer.steps={2 * steps} goes on")


@contextlib.contextmanager
def open_new_folder(recipe: Recipe, path: Path | None = None) -> Iterator[Path]:
    """Yield the folder of a new run, locked: ``path``, or one with a new name in log.dir, as an absolute
    path, since a tool or an environment may change the working directory. If the run did not begin, the lock
    is deleted, and the folder if it is empty. Raises ValueError if another process holds the lock."""
    path = path or new_run_path(Path(recipe.log.dir).absolute(), recipe.name)
    try:
        with hold_lock(path):
            try:
                yield path
            finally:
                if not RunFolder(path).recipe.exists():
                    (path / LOCK).unlink()
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            path.rmdir()


@raise_at_sigterm()
def run_session(
    recipe: Recipe,
    path: Path,
    console: Console,
    *,
    changed: Set[str] | None = None,
    workers: str,
    on_step: StepCallback | None = None,
    place: SharedPlace | None = None,
) -> Outcome:
    """Check the arguments and run a session, with the log on the terminal, unless the user handles it, and
    with failures named. ``changed``: sections that a resumed run overrides; None: a new run. ``place``: where
    other runs go side by side with it. Raises ValueError for an ``on_step`` that is not callable and for a
    recipe of supervised training."""
    if on_step is not None and not callable(on_step):
        raise ValueError(
            f"on_step is {on_step!r:.80}, which is not callable; give a function of a row of metrics"
        )
    if recipe.sft.loss != "off":
        raise ValueError(f'sft.loss is "{recipe.sft.loss}"; run ostinato sft, or set sft.loss="off" for RL')
    is_handled = console.quiet or logging.getLogger("ostinato").hasHandlers()  # of the command or the user
    with contextlib.nullcontext() if is_handled else show_log(), name_failures(path):
        return _run_session(
            recipe, path=path, console=console, changed=changed, workers=workers, on_step=on_step, place=place
        )


@contextlib.contextmanager
def name_failures(path: Path, *, begun: bool = False) -> Iterator[None]:
    """Context of work on the run in ``path``. An interruption without a message gets one with the path, if
    the run can be resumed. Once the run has ``begun``, named failures, OSError and ValueError become
    RunFailed (or NothingToLearn) that says how to go on, and so does the message of RewardFails."""
    from ostinato.pipeline.failed import RewardFails
    from ostinato.pipeline.state import NoTrainableSamples

    resume_hint = f"to go on: ostinato resume {path}"
    saved = f"what was saved is in {path}, {resume_hint}"
    try:
        yield
    except KeyboardInterrupt as stop:
        if not stop.args and RunFolder(path).recipe.exists():
            stop.args = (saved,)
        raise
    except (NamedFailure, OSError) as error:
        if not begun:
            raise
        kind = NothingToLearn if isinstance(error, NoTrainableSamples) else RunFailed
        raise kind(f"{error}; {saved}") from error
    except RewardFails as error:
        if not begun:  # the hint is added once, by the inner context
            raise
        raise RewardFails(f"{error}; then, {resume_hint}", error.note) from error
    except ValueError as error:  # after all checks it is no mistake of the user
        if not begun:
            raise
        raise RunFailed(f"the run in {path} broke: {error} (--debug shows where); {resume_hint}") from error


def _run_session(
    recipe: Recipe,
    *,
    path: Path,
    console: Console,
    changed: Set[str] | None,
    workers: str,
    on_step: StepCallback | None,
    place: SharedPlace | None,
) -> Outcome:
    """Run from the start or the newest checkpoint to the end, and export the policy. Nothing is written into
    the run folder until all inputs and components are ready; then, resumed or not, it gets the recipe."""
    clock, is_resumed = SteadyClock(), changed is not None
    with contextlib.ExitStack() as stack:
        threads = place.threads if place else configure_threads(recipe)
        recipe = resolve_auto(recipe, run=path if is_resumed else None, warn=True)
        from ostinato.launch.components import open_components
        from ostinato.launch.device_memory import name_out_of_memory
        from ostinato.launch.drafts import new_memory
        from ostinato.launch.inputs import load_app, prepare_inputs
        from ostinato.launch.loop import introduce_run, new_budget, new_ledger, new_loop, restore_run
        from ostinato.launch.machine import find_device_name
        from ostinato.pipeline.state import LoopState

        recipe = load_app("judge revisions")(recipe)
        stack.enter_context(name_out_of_memory(recipe, f"to go on: ostinato resume {path}"))
        with announce_work("loading the model, its prompts and rewards"):
            inputs = stack.enter_context(prepare_inputs(recipe, training=True, base=place and place.decoder))
        memory = None if place else new_memory(recipe.draft, RunFolder(path).history if is_resumed else None)
        inputs, components = stack.enter_context(open_components(inputs, path, memory, workers, place))
        state = LoopState()
        if changed is not None:
            state = restore_run(RunFolder.open(path), components.trainer, inputs, changed)
        if memory is not None:
            memory.history.forget_after(state.step)  # the history may be newer than the checkpoint
        check_writers(recipe.log.writers)
        if place:
            place.wait_for_all()
        run = open_run_folder(path, dump_toml(recipe), is_resumed)
        ledger = new_ledger(recipe, run, inputs.decoder, clock, components.pools)
        writers = open_writers(recipe.log.writers, path, recipe.model_dump(mode="json"))
        last_row, budget = {"step": state.step, **state.totals}, new_budget(recipe.trainer)
        scores_start, num_held_out = recipe.eval.at_start and state.step == 0, len(inputs.eval_prompts)
        text = f"scoring {num_held_out} held-out prompts before the first step" if scores_start else ""
        screen = Monitor(recipe.trainer.steps, row=last_row, budget=budget, console=console, description=text)
        with ledger.session(state.step), screen as monitor:
            prompts = inputs.train_prompts
            chats = all(prompt.messages is not None for prompt in prompts)
            record_start(run, find_device_name(inputs.decoder), asdict(inputs.algorithm), len(prompts), chats)
            for line in introduce_run(inputs, components, path, threads):
                monitor.say(line)
            if text and not console.is_terminal:  # a terminal has it on the live line
                monitor.say(text)
            monitor.forecaster, monitor.callback = load_app("forecast")(recipe, run, writers), on_step
            with name_failures(path, begun=True):
                observers = {"ledger": ledger, "observer": monitor, "writers": writers}
                loop = new_loop(inputs, components, run, state, **observers)
                finished = asyncio.run(components.run(loop, path))
                _export_policy(inputs, components.trainer.adapters(), run, finished, ledger, monitor)
    return Outcome.of(recipe, run, finished)


def _export_policy(
    inputs: RunInputs,
    adapters: Adapters | None,
    run: RunFolder,
    finished: Finished,
    ledger: Ledger,
    monitor: Monitor,
) -> None:
    """Write the trained policy. If the run was not stopped by a signal and its sampler has other weights,
    also score the policy with the exported ones, append that row to eval.jsonl, and print it; not if the file
    has such a row of this step."""
    from ostinato.launch.checks import has_own_weights
    from ostinato.launch.loop import score_exported_policy
    from ostinato.launch.policy import write_policy

    recipe, state = inputs.recipe, finished.state
    write_policy(inputs.decoder, adapters, inputs.folder, run.adapter, recipe.model.path)
    if not has_own_weights(recipe) or finished.why in ("interrupted", "terminated"):
        return
    row_keys = {(row["step"], row["set"], row.get("weights")) for row in run.eval.rows()}
    if (state.step, MAIN_SET, "model") not in row_keys:
        row = asyncio.run(score_exported_policy(inputs, adapters, state, ledger))
        run.eval.append(row)
        monitor.print_exported(row)


def open_run_folder(path: Path, recipe: str, is_resumed: bool) -> RunFolder:
    """Create the run folder ``path`` with the text of its recipe, or open it and replace its recipe."""
    if not is_resumed:
        return RunFolder.create(path, recipe)
    run = RunFolder.open(path)
    atomic_write(run.recipe, recipe.encode())
    return run
