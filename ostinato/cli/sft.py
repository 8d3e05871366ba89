"""``ostinato sft``: train on rows with answers, then print where the result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.cli.report import write_report
from ostinato.cli.restarts import session_of, supervise
from ostinato.cli.train import EXIT
from ostinato.cli.train import resume as train_resume
from ostinato.config import Recipe, find_recipe
from ostinato.launch import threads
from ostinato.model.named import is_model_name
from ostinato.pipeline.signals import Ended
from ostinato.run import RunFolder
from ostinato.terminal import logged, say


def sft(target: str, overrides: Sequence[str], *, preference: bool) -> int:
    """Returns the exit code. A model stands for the packaged recipe with it, and every row."""
    if is_model_name(target) or (Path(target).expanduser() / "config.json").is_file():
        packaged = "dpo" if preference else "sft"
        recipe = Recipe.load(packaged, f"model.path={target}", "task.n_train=0", *overrides)
    else:
        recipe = Recipe.load(find_recipe(target), *overrides)
    loss = "dpo" if preference else "tokens" if recipe.sft.loss == "off" else recipe.sft.loss
    return run(recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"loss": loss})}), None)


def resume(path: Path, overrides: Sequence[str], restarts: int = 0) -> int:
    """Of any run, supervised or not."""
    recipe = Recipe.load(RunFolder.open(path).recipe, *overrides)
    if restarts:
        return supervise(path, restarts, session_of(path, *overrides))
    return train_resume(path, overrides) if recipe.sft.loss == "off" else run(recipe, path)


@logged()
def run(recipe: Recipe, path: Path | None, ended: Callable[[Path], None] = lambda folder: None) -> int:
    """Train in a new folder or in ``path``, and call ``ended`` with it. Returns the exit code."""
    threads.configure(recipe)
    from ostinato.launch.sft import supervise

    try:
        folder, step, why = supervise(recipe, path)
    except KeyboardInterrupt as stop:
        why = stop.why if isinstance(stop, Ended) else "interrupted"
        say(f"ostinato: {why}; {str(stop) or 'nothing had begun'}", error=True)
        return EXIT[why]
    ended(folder)
    written, key = RunFolder.open(folder), "model" if recipe.adapter.kind == "full" else "adapter"
    lines = [
        f"{key:<13}{written.adapter}",
        f"report       {write_report(written)}",
        f"talk to it   ostinato serve {folder}",
        f"warm start   ostinato train RECIPE {key}.path={written.adapter}",
    ]
    lines += [f"{why} after step {step}; to go on: ostinato resume {folder}"] if why in EXIT else []
    say(*lines)
    return EXIT.get(why, 0)
