"""Read the series of evaluations that a user names: run folders, CSV files, the options of reading them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from ostinato.apps.scaling.series import Series, read_csv, read_run
from ostinato.every import Axis
from ostinato.options import add_options

MAGNITUDES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def parse_axis(text: str) -> Axis:
    """Parse the value of an option --axis. Raises typer.BadParameter for an unknown axis."""
    try:
        return Axis.parse(text, "--axis")
    except ValueError as error:  # typer shows only the value of a ValueError
        raise typer.BadParameter(str(error)) from None


AXIS = {"parser": parse_axis, "metavar": f"[{'|'.join(Axis)}]"}  # arguments of the option --axis
OF_CSV = ("compute", "score", "stderr", "by", "series", "R0")
OF_RUN = ("split", "metric", "price-per-device-hour")
Price = Annotated[
    float, typer.Option(min=0.0, help="Of a device-hour, for sessions of a run without a price.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How evaluations are read: one option of the command line for each field."""

    axis: Annotated[
        Axis | None,
        typer.Option(
            help="What compute is counted in; by default flops of a run, device-hours of a CSV.",
            show_default=False,
            **AXIS,
        ),
    ] = None
    cut: Annotated[
        str, typer.Option(metavar="C", help="Leave out evaluations before this compute, e.g. 1.5k.")
    ] = ""
    until: Annotated[str, typer.Option(metavar="C", help="Leave out evaluations after this compute.")] = ""
    compute: Annotated[str, typer.Option(metavar="COLUMN", help="Of a CSV.")] = "compute"
    score: Annotated[str, typer.Option(metavar="COLUMN", help="Of a CSV.")] = "score"
    stderr: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Of a CSV: standard errors of the scores.", show_default=False),
    ] = None
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="Of a CSV: one series for each value; may be repeated.", show_default=False
        ),
    ] = None
    series: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of a CSV: the values of --by.", show_default=False),
    ] = None
    r0: Annotated[
        float | None,
        typer.Option(
            "--R0", help="Of a CSV without a row at compute 0: the score before training.", show_default=False
        ),
    ] = None
    split: Annotated[str, typer.Option(help="Of a run: of eval.jsonl.")] = "eval"
    metric: Annotated[str, typer.Option(help="Of a run: of eval.jsonl.")] = "pass@1"
    price_per_device_hour: Price = 0.0
    low: Annotated[float, typer.Option(help="The lowest score; -1 for rewards from -1 to 1.")] = 0.0
    high: Annotated[float, typer.Option(help="The highest score.")] = 1.0

    def list_changed_options(self) -> list[str]:
        """Return the names of the options that are not at their default, as they are written."""
        names = [field.name for field in fields(self) if getattr(self, field.name) not in (field.default, [])]
        return ["R0" if name == "r0" else name.replace("_", "-") for name in names]


reading_options = add_options(Reading, "reading")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A series, and its part that is fitted."""

    whole: Series
    fitted: Series
    run: Path | None = None  # the folder that it came from

    @property
    def unit(self) -> str:
        return self.whole.axis.unit


def read_all(source: Path, reading: Reading) -> list[Series]:
    """Read all series of a CSV, or the series of a run. Raises ValueError for a source that cannot be read,
    and for an option of the other kind of source."""
    if source.is_dir():
        _refuse_options(reading, OF_CSV, f"{source} is a run folder and the option is for a CSV")
        return [
            read_run(
                source,
                reading.axis or Axis.FLOPS,
                reading.split,
                metric=reading.metric,
                low=reading.low,
                high=reading.high,
                price=reading.price_per_device_hour,
            )
        ]
    if not source.is_file():
        raise ValueError(f"{source} is neither a run folder nor a CSV file; name one that exists")
    _refuse_options(reading, OF_RUN, f"{source} is a CSV and the option is for a run folder")
    try:
        return read_csv(
            source,
            compute=reading.compute,
            score=reading.score,
            by=reading.by or (),
            stderr=reading.stderr,
            R0=reading.r0,
            axis=reading.axis or Axis.DEVICE_HOURS,
            low=reading.low,
            high=reading.high,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no text in UTF-8; give a CSV or a run folder") from error


def _refuse_options(reading: Reading, names: Sequence[str], reason: str) -> None:
    for name in reading.list_changed_options():
        if name in names:
            raise ValueError(f"--{name} is given, but {reason}; drop it")


def read_one(source: Path, reading: Reading) -> Window:
    """Read the chosen series and its window. Raises ValueError if there are several, as ``read_all``, or if
    the window has no evaluation."""
    choices = _choose_series(source, reading)
    if len(choices) != 1:
        names = ", ".join(repr(choice.name) for choice in choices)
        raise ValueError(f"{source} has {len(choices)} series; choose one with --series: {names}")
    return select_window(source, choices[0], reading)


def read_several(sources: Sequence[Path], reading: Reading) -> list[Window]:
    """Read all chosen series and their windows. Raises ValueError for fewer than two, and as ``read_one``."""
    windows = [
        select_window(source, choice, reading)
        for source in sources
        for choice in _choose_series(source, reading)
    ]
    if len(windows) < 2:
        raise ValueError(f"{sources[0]} has one series; name another run, or two series of a file")
    return windows


def _choose_series(source: Path, reading: Reading) -> list[Series]:
    """Return the series that --series names, in its order, or all. Raises ValueError for an unknown name."""
    candidates = read_all(source, reading)
    by_name = {candidate.name: candidate for candidate in candidates}
    for name in reading.series or ():
        if name not in by_name:
            names = ", ".join(map(repr, by_name))
            raise ValueError(f"--series is {name!r}, and {source} has {names}; choose one of them")
    return [by_name[name] for name in reading.series or ()] or candidates


def select_window(source: Path, whole: Series, reading: Reading) -> Window:
    """Return the part of a series between --cut and --until. Raises ValueError if it has no evaluation, and
    for bounds that are no positive numbers."""
    first = parse_amount(reading.cut, "--cut") if reading.cut else 0.0
    last = parse_amount(reading.until, "--until") if reading.until else math.inf
    fitted = whole.between(first, last)
    if len(whole) and not len(fitted):
        raise ValueError(
            f"{whole.name} was evaluated from compute {whole.compute[0]:g} to {whole.compute[-1]:g}, none of"
            " it between --cut and --until; widen them"
        )
    return Window(whole=whole, fitted=fitted, run=source if source.is_dir() else None)


def parse_amount(text: str, option: str) -> float:
    """Parse a positive number: "100k", "1.5e21", "30000". Raises ValueError in words."""
    factor = MAGNITUDES.get({"K": "k"}.get(text[-1:], text[-1:]), 1.0)
    try:
        value = factor * float(text if factor == 1.0 else text[:-1])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{option} is {text!r}; write a positive number, e.g. 30000, 100k or 1.5e21")
    return value
