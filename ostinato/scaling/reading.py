"""From what a user names to a series of evaluations: run folders, CSV files, the options of reading them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ostinato.axis import Axis
from ostinato.observe.report.reading import read_run as run_rows
from ostinato.options import options_of
from ostinato.run import RunFolder
from ostinato.scaling.cut import Cut, auto_cut
from ostinato.scaling.series import Series, read_csv, read_run

AUTO = "auto"  # of --cut
MAGNITUDES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def axis_of(text: str) -> Axis:
    """The value of an option --axis."""
    try:
        return Axis.parse(text, "--axis")
    except ValueError as error:  # of a ValueError typer tells the value alone
        raise typer.BadParameter(str(error)) from None


AXIS = {"parser": axis_of, "metavar": f"[{'|'.join(Axis)}]"}  # of its option
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
        str,
        typer.Option(
            metavar="C",
            help="Leave out evaluations before this compute, e.g. 1.5k; auto: the first epoch, and what the"
            " ceiling would hang on; auto:1.5k both.",
        ),
    ] = ""
    until: Annotated[
        str, typer.Option(metavar="C", help="Fit up to this compute; what comes later is held against it.")
    ] = ""
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

    def given(self) -> list[str]:
        """The options that are not at their default, as they are written."""
        names = [one.name for one in fields(self) if getattr(self, one.name) not in (one.default, [])]
        return ["R0" if name == "r0" else name.replace("_", "-") for name in names]


reading_options = options_of(Reading, "reading")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A series, and the part of it that is fitted."""

    whole: Series
    fitted: Series
    run: Path | None = None  # the folder that it came from
    cut: Cut | None = None  # where --cut auto chose

    @property
    def later(self) -> Series:
        """What came after the part that is fitted."""
        end = float(self.fitted.compute[-1]) if len(self.fitted) else math.inf
        return self.whole.take(self.whole.compute > end)

    @property
    def unit(self) -> str:
        return self.whole.axis.unit


def read_all(source: Path, reading: Reading) -> list[Series]:
    """All series of a CSV, or the one of a run. Raises ValueError in words, for options of the other too."""
    if source.is_dir():
        _refuse(reading, OF_CSV, f"{source} is a run folder and the option is for a CSV")
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
    _refuse(reading, OF_RUN, f"{source} is a CSV and the option is for a run folder")
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


def _refuse(reading: Reading, names: Sequence[str], why: str) -> None:
    for name in reading.given():
        if name in names:
            raise ValueError(f"--{name} is given, but {why}; drop it")


def read_one(source: Path, reading: Reading, *, waiting: bool = False) -> Window:
    """The series that is meant, and its window, which may be empty while one is ``waiting`` for more."""
    names = reading.series or [None]
    if len(names) > 1:
        raise ValueError(f"--series is given {len(names)} times; this command takes one series")
    return window(source, _named(read_all(source, reading), source, names[0]), reading, waiting=waiting)


Side = tuple[Window, ...]  # the seeds of one recipe


def read_pair(sources: Sequence[str], reading: Reading) -> tuple[Side, Side]:
    """Two sides, each a run or a file, or several seeds with commas between; or two --series of one file."""
    if len(sources) == 2:
        sides = [_paths(source) for source in sources]
        names = reading.series or [None, None]
        if len(names) != 2:
            raise ValueError(
                f"--series is given {len(names)} times for two sides; give one for each, or none"
            )
        one, other = (
            [(path, found) for path in side for found in _several(read_all(path, reading), path, name)]
            for side, name in zip(sides, names, strict=True)
        )
        return _pair(one, other, reading)
    (path,) = (Path(source) for source in sources)
    found = read_all(path, reading)
    names = reading.series or [one.name for one in found]
    if len(names) != 2:
        raise ValueError(
            f"{path} has {len(found)} series and {len(reading.series or ())} are named; compare two"
            " runs, or choose two series: --series ONE --series OTHER"
        )
    one, other = ([(path, each) for each in _several(found, path, name)] for name in names)
    return _pair(one, other, reading)


Named = Sequence[tuple[Path, Series]]


def _pair(one: Named, other: Named, reading: Reading) -> tuple[Side, Side]:
    """Raises ValueError for a run that is given twice: a seed counted twice would pass for one more."""
    given = [(path.resolve(), found.name) for path, found in [*one, *other]]
    for _, name in (one for one in given if given.count(one) > 1):
        raise ValueError(f"{name} is given more than once; name every run once, as in a0,a1,a2 b0,b1,b2")
    first, second = (tuple(window(path, found, reading) for path, found in side) for side in (one, other))
    return first, second


def _paths(source: str) -> list[Path]:
    """One path, or several with commas between."""
    return [Path(source)] if Path(source).exists() else [Path(part) for part in source.split(",")]


def _several(found: Sequence[Series], source: Path, name: str | None) -> list[Series]:
    """The series of that name, or of several names with commas between."""
    if name is None or "," not in name or any(one.name == name for one in found):
        return [_named(found, source, name)]
    return [_named(found, source, part) for part in name.split(",")]


def _named(found: Sequence[Series], source: Path, name: str | None) -> Series:
    known = ", ".join(repr(one.name) for one in found)
    if name is None:
        if len(found) == 1:
            return found[0]
        raise ValueError(f"{source} has {len(found)} series; choose one with --series: {known}")
    for one in found:
        if one.name == name:
            return one
    raise ValueError(f"--series is {name!r}, and {source} has {known}; choose one of them")


def window(source: Path, whole: Series, reading: Reading, *, waiting: bool = False) -> Window:
    """The part between --cut and --until. Raises ValueError where nothing is left, unless one is waiting."""
    automatic, _, least = (
        reading.cut.partition(":") if reading.cut.startswith(AUTO) else ("", "", reading.cut)
    )
    if automatic not in ("", AUTO):
        raise ValueError(f"--cut is {reading.cut!r}; write auto, auto:1.5k or a positive number")
    first = amount(least, "--cut") if least else 0.0
    last = amount(reading.until, "--until") if reading.until else math.inf
    fitted = whole.between(first, last)
    if len(whole) and not len(fitted) and not waiting:
        raise ValueError(
            f"{whole.name} was evaluated from compute {whole.compute[0]:g} to {whole.compute[-1]:g}, none of"
            " it between --cut and --until; widen them"
        )
    run = source if source.is_dir() else None
    if not automatic or not len(fitted):
        return Window(whole=whole, fitted=fitted, run=run)
    epoch = None if run is None else _epoch(run, whole, reading)
    cut = auto_cut(whole.between(last=last), epoch=epoch, least=first)
    return Window(whole=whole, fitted=fitted.between(first=cut.first), run=run, cut=cut)


def _epoch(run: Path, whole: Series, reading: Reading) -> float | None:
    """The compute of one pass over the training prompts, as many as there were when the run began, or by its
    recipe, where 0 stands for all that there are; None where it is not known."""
    data = run_rows(RunFolder.open(run))
    began = data.starts[0].get("train_prompts") if data.starts else None
    prompts, per_step = began or data.setting("task.n_train"), data.setting("rollout.prompts_per_step")
    if not (isinstance(prompts, int) and isinstance(per_step, int) and prompts and per_step):
        return None
    steps = read_run(
        run, Axis.STEPS, reading.split, metric=reading.metric, low=reading.low, high=reading.high
    ).compute
    epoch = prompts / per_step
    if epoch > steps[-1]:
        return float(whole.compute[-1] * epoch / steps[-1])
    return float(np.interp(epoch, np.append(0, steps), np.append(0, whole.compute)))


def amount(text: str, option: str) -> float:
    """ "100k", "1.5e21", "30000": a positive number. Raises ValueError in words."""
    factor = MAGNITUDES.get({"K": "k"}.get(text[-1:], text[-1:]), 1.0)
    try:
        value = factor * float(text if factor == 1.0 else text[:-1])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{option} is {text!r}; write a positive number, e.g. 30000, 100k or 1.5e21")
    return value
