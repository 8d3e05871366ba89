"""``ostinato report``: the page, and sampler against trainer in the terminal."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from ostinato.model.named import model_folder
from ostinato.observe.report.facts import milestones
from ostinato.observe.report.terminal import terminal_table
from ostinato.render import Renderer
from ostinato.run import RunFolder, to_json
from ostinato.terminal import Screen


def report(run: Path, out: Path | None = None, *, show: bool = False) -> Path:
    """Write the report of a run folder, open it in a browser if ``show``, and return its path."""
    path = write_report(RunFolder.open(run), out)
    if show:
        webbrowser.open(path.resolve().as_uri())
    return path


def print_mismatch(run: Path, *, as_json: bool = False) -> None:
    """Sampler against trainer in the terminal: the section of the report in words and tables, or all of it
    as one JSON object."""
    from ostinato.observe.report.mismatch import facts, lead, summary, tables
    from ostinato.observe.report.reading import read_run

    data = read_run(RunFolder.open(run))
    if as_json:
        print(to_json(summary(data)))
        return
    console = Screen()
    for sentence in (*data.damage, lead(data)):
        console.print(sentence, highlight=False, markup=False)
    for table in tables(data):
        console.print(terminal_table(table, console.width))
    for fact in [*facts(data), *milestones(data)]:
        note = f" ({fact.note})" if fact.note else ""
        console.print(f"{fact.name}: {fact.value}{note}", highlight=False, markup=False)


def write_report(run: RunFolder, out: Path | None = None) -> Path:
    """The report with the tokenizer of the run's model, where it is on this machine."""
    from ostinato.observe.report import write_report as write

    return write(run, out, renderer=local_renderer(run))


def local_renderer(run: RunFolder) -> Renderer | None:
    """The tokenizer that the run sampled with; None where it is not at hand. Downloads nothing."""
    from ostinato.config import Recipe

    try:
        path = Recipe.load(run.recipe).model.path
        return Renderer(_cached(path) or model_folder(path))
    except ValueError:  # a recipe of another version, a model that has moved: the report does without
        return None


def _cached(path: str) -> Path | None:
    """The cached folder of a hub name, None for other paths; ValueError for a hub name that is not there."""
    is_hub_name = path.count("/") == 1 and ":" not in path and not Path(path).expanduser().exists()
    if not is_hub_name:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise ValueError(f"{path} is a hub name and huggingface_hub is missing") from error
    file = try_to_load_from_cache(path, "tokenizer.json")
    if not isinstance(file, str):
        raise ValueError(f"the tokenizer of {path} is not in the cache")
    return Path(file).parent
