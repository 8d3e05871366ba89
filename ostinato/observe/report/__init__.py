"""report.html of a run folder: one file that opens offline, from what the run wrote and nothing else.

    run folder -> reading -> facts, concerns, charts, samples, pictures -> page (a jinja template, scripts)

Works for a run that is still going, was killed or never began: a sentence replaces what is missing. Nothing
in the page is fetched: its Content-Security-Policy allows its own scripts, by digest, and no connection.
"""

from __future__ import annotations

from pathlib import Path

from ostinato.observe.report.page import html
from ostinato.observe.report.pictures import read_pictures
from ostinato.observe.report.reading import read_run
from ostinato.observe.report.samples import pack_samples
from ostinato.render import Renderer
from ostinato.run import RunFolder, atomic_write


def write_report(run: RunFolder, out: Path | None = None, *, renderer: Renderer | None = None) -> Path:
    """Write the report of ``run`` atomically to ``out`` (report.html in its folder) and return the path.

    ``renderer`` is the tokenizer of the run's model: with it, sampled tokens are shown as text, one by one;
    without it, by their ids beside the text of the whole turn.
    """
    data = read_run(run)
    page = html(data, pack_samples(run.trajectories, renderer), read_pictures(run.path / "pictures"))
    path = out or run.report
    atomic_write(path, page)
    return path


__all__ = ["write_report"]
