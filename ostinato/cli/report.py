"""``ostinato report``: the page of runs, as a file or followed while they go, and its first numbers here."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ostinato.access import Access, is_loopback
from ostinato.model.named import find_model_folder
from ostinato.observe.concerns import concerns, list_checks
from ostinato.observe.figures import commands, subtract_runs, tabulate, verdict
from ostinato.observe.gap import compare_arms, describe_gap, summarise_gap
from ostinato.observe.page import now, state
from ostinato.observe.page import write_report as write
from ostinato.observe.page.serve import open_page, open_server
from ostinato.observe.rows import RunRows
from ostinato.observe.samples import Samples
from ostinato.render import Renderer
from ostinato.run import RunFolder, to_json
from ostinato.tables import terminal_table
from ostinato.terminal import Screen, say


def report(
    paths: Sequence[Path], out: Path | None = None, *, show: bool = False, as_json: bool = False
) -> None:
    """Print what the runs have come to, as the page begins; write the page, several runs side by side, and
    say where; open it in a browser if ``show``. ``as_json``: print what the page embeds but its curves."""
    runs = [RunFolder.open(path) for path in paths]
    console, data = Screen(), [RunRows(run).read() for run in runs]
    if as_json:
        states = [{**now(one), "state": state(one, Samples(one.run.trajectories.path, None))} for one in data]
        print(to_json({"runs": states, "between": list(subtract_runs(data))}))
        return
    console.print(terminal_table(tabulate(*data), console.width))
    for one in data:
        name = f"{one.name}: " if len(data) > 1 else ""
        warnings = [f"{concern.level}: {concern.text}" for concern in concerns(one)]
        for sentence in (verdict(one)[0], *warnings, f"Looked at: {list_checks(one)}."):
            console.print(f"{name}{sentence}", highlight=False, markup=False)
    advice = [f"{command}  ({what})" for what, command in commands(data[0])] if len(data) == 1 else []
    for sentence in (*subtract_runs(data), *advice):
        console.print(sentence, highlight=False, markup=False)
    path = write_report(*runs, out=out)
    say("Answers before and after to the same prompts, charts and every setting are in this page:")
    say(str(path))
    if show:
        webbrowser.open(path.resolve().as_uri())


def serve(path: Path, host: str, port: int, access: Access, *, show: bool) -> None:
    """Serve the page of the run, or of the product's loop, in ``path`` until Ctrl-C: it grows with the run.
    Raises ValueError where there is none, or the port is taken."""
    with open_server(open_page(path, local_renderer), host, port, access) as server:
        say(f"page of {path}: {server.address} (Ctrl-C ends it)")
        if not is_loopback(host):
            say("everyone who can reach this port reads the prompts and answers of the run", error=True)
        if show:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")


def print_mismatch(run: Path, *, as_json: bool = False) -> None:
    """Sampler against trainer in words and tables, or as one JSON object."""
    data = RunRows(RunFolder.open(run)).read()
    if as_json:
        print(to_json(summarise_gap(data)))
        return
    console = Screen()
    alarms = [concern.text for concern in concerns(data) if concern.about in ("gap", "policy")]
    for sentence in (*data.damage, describe_gap(data), *alarms):
        console.print(sentence, highlight=False, markup=False)
    for table in compare_arms(data):
        console.print(terminal_table(table, console.width))


def write_report(*runs: RunFolder, out: Path | None = None) -> Path:
    """The page, of one run with the tokenizer of its model, where it is on this machine."""
    return write(runs, out, renderer=local_renderer(runs[0]) if len(runs) == 1 else None)


def local_renderer(run: RunFolder) -> Renderer | None:
    """The tokenizer that the run sampled with; None where it is not at hand. Downloads nothing."""
    from ostinato.config import Recipe

    try:
        path = Recipe.load(run.recipe).model.path
        return Renderer(_cached(path) or find_model_folder(path))
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
