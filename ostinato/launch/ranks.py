"""The ranks of a sharded trainer: rank 0 is the run, the others follow it.

    torchrun ... -m ostinato train recipe.toml parallel.layout=d2t2     every rank is this command
    ostinato train recipe.toml parallel.layout=d2t2                     rank 0 starts the others on its host

A follower reads no recipe and no run folder, as rank 0 sends everything but the model. The model must have
the same path or name on every host."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.config import ModelSection, Recipe, dump_toml
from ostinato.config.sections import ParallelSection
from ostinato.launch import RunFailed
from ostinato.parallel.launch import Place, Ranks, choose_interface, local_place
from ostinato.parallel.layout import Layout
from ostinato.terminal import say
from ostinato.workers.process import end_with_parent

if TYPE_CHECKING:
    from ostinato.launch.inputs import RunInputs
    from ostinato.parallel.ranks import Local, Ready, ShardedTrainer
    from ostinato.protocols import RestorableTrainer

logger = logging.getLogger(__name__)
STAY_S = 5.0  # time for which further ranks stay after a rank was lost
LOST_RANK_CODE = 1  # exit code of a rank that ends because another one is lost


def find_follower() -> Place | None:
    """Return the place of this process if it is a rank other than 0; None for the run itself."""
    place = Place.of(os.environ)
    return place if place is not None and place.rank else None


def follow_run(place: Place, *, child: bool = False) -> int:
    """Serve rank 0 until it ends; returns the exit code. From now on this process ignores SIGINT and SIGTERM.
    A ``child`` of the run also exits at once when that process ends. Otherwise, after a lost rank, it returns
    only after STAY_S seconds."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides, and its last step needs all ranks
        signal.signal(number, signal.SIG_IGN)
    if child:
        end_with_parent(_exit_lost)
    choose_interface(place, os.environ)
    from ostinato.algo.routing import Misaligned
    from ostinato.launch.models import divides_transformers
    from ostinato.launch.trainer import new_sampling_rank, new_sharded_trainer
    from ostinato.parallel.ranks import follow_calls
    from ostinato.workers.remote import WorkerLost

    def new_local(text: str, ready: Ready) -> Local:
        import tomllib

        recipe = Recipe.parse(tomllib.loads(text))
        _choose_gpu(recipe.model, place)
        if divides_transformers(recipe):
            return new_sampling_rank(recipe, place.rank, ready=ready)
        return new_sharded_trainer(recipe, place.rank, ready=ready)

    try:
        follow_calls(place, new_local, (Misaligned,))
    except WorkerLost as lost:
        say(f"ostinato: {lost}", error=True)
        if not child:  # torchrun ends all ranks when the first one ends, and rank 0 has to save and report
            time.sleep(STAY_S)
        return LOST_RANK_CODE
    return 0


def _exit_lost(sentence: str) -> None:
    """Print the sentence and exit at once, from any thread, as another thread may be in a collective that
    does not end."""
    say(f"ostinato: {sentence}", error=True)
    os._exit(LOST_RANK_CODE)


@contextlib.contextmanager
def open_sharded_trainer(inputs: RunInputs, folder: Path) -> Iterator[tuple[ShardedTrainer, Local]]:
    """Start the other ranks of ``parallel.layout``, or meet those of torchrun, and yield (the trainer over
    all of them, this rank's part), which end with the context. ``folder``: of the run.

    Raises ValueError in a process that is not rank 0, for a layout that the model does not have, and for a
    backend or GPU that is not there; RunFailed if a rank is lost before all have begun.
    """
    from ostinato.algo.routing import Misaligned
    from ostinato.launch.machine import choose_device
    from ostinato.launch.models import divides_transformers
    from ostinato.launch.trainer import make_refused_saver, new_sampling_rank, new_sharded_trainer
    from ostinato.parallel.ranks import Terms, keep_store, lead, meet
    from ostinato.workers.remote import WorkerLost

    recipe, layout = inputs.recipe, Layout.parse(inputs.recipe.parallel.layout)
    if not divides_transformers(recipe):  # there the model is refused when it is loaded
        layout.refuse(inputs.decoder.config)
    place = Place.of(os.environ)
    if place is not None and place.rank:
        raise ValueError(
            f"RANK is {place.rank}, and only rank 0 is the run; start it by `torchrun ... -m ostinato "
            "train`, whose other ranks follow"
        )
    with contextlib.ExitStack() as stack:
        try:
            if place is None:
                store = keep_store()
                place = local_place(layout.world, store.port)
                ranks = stack.enter_context(Ranks.open(layout.world, store.port, folder / "ranks"))
                find_ended, location = ranks.find_ended, "on this host"
            else:
                store, find_ended, location = meet(place), dict, f"meeting at {place.address}:{place.port}"
            choose_interface(place, os.environ)
            logger.info(f"ranks        {layout.world} of layout {layout}, {location}")
            terms = Terms(
                backend=choose_collectives(recipe.parallel, choose_device(recipe.model).partition(":")[0]),
                timeout_s=recipe.parallel.timeout_s,
                recipe=dump_toml(recipe),
            )
            refused = make_refused_saver(folder / "refused")
            parts: list[Local] = []

            def new_local(ready: Ready) -> Local:
                _choose_gpu(recipe.model, place)
                if divides_transformers(recipe):
                    parts.append(new_sampling_rank(recipe, 0, refused, ready))
                else:
                    parts.append(new_sharded_trainer(recipe, 0, inputs.decoder, refused, ready))
                return parts[0]

            trainer = stack.enter_context(lead(place, store, terms, new_local, find_ended, (Misaligned,)))
        except WorkerLost as error:
            raise RunFailed(f"the ranks of {layout} could not begin: {error}") from error
        yield trainer, parts[0]


@contextlib.contextmanager
def open_trainer(
    inputs: RunInputs, folder: Path, between: Callable[[], None] = lambda: None
) -> Iterator[RestorableTrainer]:
    """Yield the loop's trainer, with its teacher: in this process, where it calls ``between`` before every
    microbatch, or over the ranks of ``parallel.layout``. It keeps the microbatches of refused steps in
    ``folder``, the run's."""
    from ostinato.launch.trainer import make_refused_saver, new_adapters, new_teacher, new_trainer

    recipe, decoder = inputs.recipe, inputs.decoder
    if recipe.parallel.sharded:
        with open_sharded_trainer(inputs, folder) as (trainer, _):
            yield trainer
        return
    adapters = new_adapters(recipe, decoder)
    refused, teacher = make_refused_saver(folder / "refused"), new_teacher(recipe, decoder)
    yield new_trainer(recipe, decoder, adapters, refused, teacher, between)


def _choose_gpu(section: ModelSection, place: Place) -> None:
    """Make the GPU with this rank's number on its host the current one, unless the model is on the CPU.

    Raises ValueError if the host has fewer GPUs."""
    import torch

    if section.device == "cpu" or not torch.cuda.is_available():
        return
    if place.local_rank >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"rank {place.rank} is number {place.local_rank} of its host, which has {count} GPUs; start no "
            'more ranks there than it has, or use model.device="cpu"'
        )
    torch.cuda.set_device(place.local_rank)


def choose_collectives(section: ParallelSection, device: str) -> str:
    """Choose the backend of torch.distributed: the recipe's, or for "auto" the one for the device; beside
    nccl gloo for tensors on the CPU. Raises ValueError for a backend that the device does not have."""
    name = section.backend
    if name == "auto":
        name = "nccl" if device == "cuda" else "gloo"
    if (name == "nccl") != (device == "cuda"):
        raise ValueError(
            f'parallel.backend is "{name}" with a model on {device}, for which it has no collectives; use '
            '"auto"'
        )
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name
