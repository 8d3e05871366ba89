"""The run folder: the files of a run, and the two ways of writing them that survive a crash.

    runs/<recipe>-<yyyymmdd-hhmmss>/
        recipe.toml  metrics.jsonl  ledger.jsonl  trajectories.jsonl.zst  eval.jsonl
        mismatch.jsonl  watch.jsonl  forecast.jsonl  timeline.jsonl  failed_rewards.jsonl
        checkpoints/  adapter/  scored/  pictures/  history.bin  report.html  .lock

Whole files are replaced (``atomic_write``, ``atomic_folder``): a reader sees the old one or the new one.
Logs are appended to, one JSON object per line, and forgive a torn end: what a kill, a full disk or a power
cut (which leaves zeros) has left of the last row is cut off before the next is written, and readers skip it.
Damage before whole rows is a ValueError. A row that belongs to a step has the key "step";
``RunFolder.truncate_after`` relies on it when a run is resumed.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ostinato.files import atomic_write, name_file_in_errors, read_umask, sync
from ostinato.inputs import escape_surrogates, parse_json
from ostinato.lock import LOCK
from ostinato.routes import routes_from_json, routes_to_json
from ostinato.types import Group, Trajectory

logger = logging.getLogger(__name__)
Row = Mapping[str, Any]
STEP_FIRST = b'{"step":'  # the beginning of a row of a log
MAIN_SET = "eval"  # in eval.jsonl: the set that a run is judged and forecast by, beside downstream ones
GREEDY_SET = "greedy"  # the same prompts at temperature 0, before and after training
# entries that may precede the run: its lock, logs of earlier processes, restarts of lost sessions
EARLY_ENTRIES = ("vllm", "ranks", "restarts.jsonl", LOCK)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path``; it takes the place of ``path`` when the block ends well.

    A folder cannot be replaced in one call: between the two renames a crash leaves the old one under
    ``.<name>.old``, complete, which the next write of ``path`` puts back first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            file.chmod((0o777 if file.is_dir() else 0o666) & ~read_umask())  # safetensors writes 0600
            sync(file)
        sync(temporary)
        temporary.chmod(0o777 & ~read_umask())  # as mkdtemp
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def to_json(row: Row) -> str:
    """The row as one line of JSON: numpy values as lists and numbers, NaN and infinities as null, other types
    (a date in a row's columns) as strings, half of a surrogate pair as its escape."""
    text = json.dumps(_to_plain(row), separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)
    return escape_surrogates(text)


def _to_plain(value: Any) -> Any:
    """``value`` with numpy values as Python's, text keys, and None in place of NaN and infinities."""
    if isinstance(value, np.ndarray | np.generic):
        # Via str: the shortest digits that give the float32 back, not the 17 digits of its float64.
        exact = value.astype("U16").astype(np.float64) if value.dtype == np.float32 else value
        return _to_plain(exact.tolist())
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _append_bytes(path: Path, data: bytes) -> None:
    """Append all of ``data`` to the file, or none of it when that fails."""
    with name_file_in_errors(path), path.open("ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        except OSError:
            file.truncate(start)
            raise


class Jsonl:
    """A log of one JSON object per line, readable while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_end_checked = False  # whether the end of the file has been checked

    def append(self, *rows: Row) -> None:
        """Append rows, written through to the operating system: they outlive the process, not a power cut.
        The first call cuts off a torn end."""
        if not self._is_end_checked:
            self._cut_torn_end()
        _append_bytes(self.path, "".join(to_json(row) + "\n" for row in rows).encode())

    def rows(self) -> Iterator[dict[str, Any]]:
        """The complete rows. Raises ValueError for a damaged line before the end."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            yield from _parse_lines(file, self.path)

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        """Drop, atomically, the rows that are not wanted, and a torn last row. Does nothing without a file.
        Raises ValueError as ``rows`` does."""
        if self.path.exists():
            lines = [to_json(row) + "\n" for row in self.rows() if wanted(row)]
            atomic_write(self.path, "".join(lines))

    def _cut_torn_end(self) -> None:
        if self.path.exists():
            with self.path.open("rb+") as file:
                file.truncate(_find_last_line_end(file))
        self._is_end_checked = True


def _find_last_line_end(file: BinaryIO, block: int = 65536) -> int:
    """The offset behind the last newline, found from the end of the file."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _parse_lines(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the row of each complete line. Raises ValueError for a line that is no JSON object."""
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return  # torn: the row was never completed
        try:
            row = parse_json(line, surrogates=True)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is not JSON; delete it to read the rest") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {path} is no JSON object; delete it to read the rest")
        yield row


# Limits of a zstd frame: one that expands beyond both is not decompressed in full.
_MAX_BYTES = 1 << 28
_MAX_RATIO = 1000
_ADVICE = "move the file away, and what it holds is done without"
_ZSTD = (0xFD2FB528).to_bytes(4, "little")  # a frame begins with it


class JsonlZst:
    """A log of JSON lines in concatenated zstd frames, one frame per ``append``; `zstdcat` reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_end_checked = False

    def append(self, *rows: Row) -> None:
        import zstandard

        if not self._is_end_checked:
            self._cut_torn_end()
        lines = "".join(to_json(row) + "\n" for row in rows).encode()
        _append_bytes(self.path, zstandard.ZstdCompressor(write_checksum=True).compress(lines))

    def rows(self) -> Iterator[dict[str, Any]]:
        for _, lines in self._iterate_frames():
            yield from self._parse_lines(lines.splitlines(keepends=True))

    def rows_since(self, step: int) -> Iterator[dict[str, Any]]:
        """The rows of ``step`` and later steps, and rows without a step. Earlier rows are skipped without
        being parsed, since a row begins with its step."""
        for _, lines in self._iterate_frames():
            recent = [line for line in lines.splitlines(keepends=True) if _read_step(line, step) >= step]
            yield from (row for row in self._parse_lines(recent) if row.get("step", step) >= step)

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        """Drop, atomically, the rows that are not wanted, and what is behind the last whole frame. Does
        nothing without a file. Raises ValueError for damage before a whole frame."""
        if not self.path.exists():
            return
        replacement = JsonlZst(self.path.with_name(f".{self.path.name}.kept"))
        try:
            replacement.path.write_bytes(b"")
            for _, lines in self._iterate_frames(cutting=True):
                rows = [row for row in self._parse_lines(lines.splitlines(keepends=True)) if wanted(row)]
                if rows:
                    replacement.append(*rows)
            sync(replacement.path)
            replacement.path.replace(self.path)
        finally:
            replacement.path.unlink(missing_ok=True)
        sync(self.path.parent)

    def _cut_torn_end(self) -> None:
        if self.path.exists():
            end = 0
            for end, _ in self._iterate_frames(cutting=True):  # noqa: B007  the last offset is what we want
                pass
            os.truncate(self.path, end)
        self._is_end_checked = True

    def _parse_lines(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        try:
            yield from _parse_lines(lines, self.path)
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged ({error.__cause__ or error}); {_ADVICE}") from error

    def _iterate_frames(self, *, cutting: bool = False) -> Iterator[tuple[int, bytes]]:
        """(offset behind the frame, its content) of every complete frame. Raises ValueError for damage before
        a complete frame; bytes behind the last one are skipped, with a warning if ``cutting``."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            end, size = 0, file.seek(0, os.SEEK_END)
            while end < size and (frame := self.frame(file, end)) is not None:
                end, content = frame
                yield end, content
            if end == size:
                return
            file.seek(end)
            rest = file.read()
            offset = rest.find(_ZSTD, 1)
            while offset > 0:
                if self.frame(file, end + offset) is not None:
                    raise ValueError(
                        f"{self.path} is damaged in its bytes {end} to {end + offset}; {_ADVICE}"
                    )
                offset = rest.find(_ZSTD, offset + 1)
            if cutting:
                logger.warning(f"{self.path}: its last {size - end} bytes are no whole rows and are cut off")

    def frame(self, file: BinaryIO, start: int, block: int = 1 << 13) -> tuple[int, bytes] | None:
        """(offset behind the frame, its content) of the frame that begins at ``start``; None without a
        complete one. Moves the position of ``file``. Raises ValueError for a frame that expands beyond the
        limits."""
        import zstandard

        file.seek(start)
        frame, content = zstandard.ZstdDecompressor().decompressobj(), []
        end, size = start, 0
        while not frame.eof:
            if not (data := file.read(block)):
                return None
            try:
                part = frame.decompress(data)
            except zstandard.ZstdError:
                return None
            end += len(data) - len(frame.unused_data)
            size += len(part)
            if size > max(_MAX_BYTES, _MAX_RATIO * (end - start)):
                raise ValueError(
                    f"{self.path} grows {size / (end - start):,.0f}-fold at byte {start}; {_ADVICE}"
                )
            content.append(part)
        return end, b"".join(content)


def _read_step(line: bytes, default: int) -> int:
    """The step that a line begins with; ``default`` if it begins with none."""
    digits = line[len(STEP_FIRST) :].partition(b",")[0] if line.startswith(STEP_FIRST) else b""
    return int(digits) if digits.isdigit() else default


def group_rows(group: Group, advantages: np.ndarray | None = None) -> list[dict[str, Any]]:
    """The rows of trajectories.jsonl.zst for one group, one per trajectory, with its advantage; NaN or None:
    it was not trained on."""
    prompt = group.prompt
    numbers = [None] * len(group.trajectories) if advantages is None else advantages.tolist()
    shown = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
    return [
        {"step": group.step, "uid": prompt.uid, "sample": index, "prompt": shown, "columns": prompt.columns}
        | {"advantage": None if number is None or math.isnan(number) else number}
        | _write_trajectory(trajectory)
        for index, (trajectory, number) in enumerate(zip(group.trajectories, numbers, strict=True))
    ]


def _write_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of a trajectory and its turns in a row of the log."""
    reward = trajectory.reward
    turns = [
        {
            "context": turn.context,
            "new_row": turn.new_row,
            "tokens": turn.completion.tokens,
            "logprobs": turn.completion.logprobs,
            "versions": turn.completion.versions,
            "injected": None
            if turn.completion.injected is None
            else np.flatnonzero(turn.completion.injected),
            "kept": None if turn.completion.support is None else turn.completion.support.counts,
            "experts": None if turn.completion.experts is None else routes_to_json(turn.completion.experts),
            "text": turn.completion.text,
            "stop": turn.completion.stop,
        }
        for turn in trajectory.turns
    ]
    return {
        "seed": trajectory.seed,
        "env_reward": trajectory.env_reward,
        "ended": trajectory.ended,
        "last_reply": trajectory.last_reply,
        "stop": trajectory.stop,
        "error": trajectory.error,
        "reward": None if reward is None else reward.value,
        "reason": "" if reward is None else reward.reason,
        "parts": {} if reward is None else reward.parts,
        **({"extra": reward.extra} if reward is not None and reward.extra else {}),
        "turns": turns,
    }


def read_routes(folder: RunFolder, since: int = 0) -> dict[int, np.ndarray]:
    """{step: routes [T, layers, K]} of the recorded answers from step ``since`` on; steps without routes are
    left out."""
    steps: dict[int, list[np.ndarray]] = {}
    for row in folder.trajectories.rows_since(since):
        routes = [routes_from_json(turn["experts"]) for turn in row["turns"] if turn["experts"]]
        steps.setdefault(row["step"], []).extend(routes)
    return {step: np.concatenate(parts) for step, parts in sorted(steps.items()) if parts}


class RunFolder:
    """The files of one run. Make one with ``create`` (a new run) or ``open`` (to resume or to read)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.toml"
        self.checkpoints = path / "checkpoints"
        self.adapter = path / "adapter"
        self.scored = path / "scored"
        self.history = path / "history.bin"
        self.report = path / "report.html"
        self.metrics = Jsonl(path / "metrics.jsonl")
        self.ledger = Jsonl(path / "ledger.jsonl")
        self.eval = Jsonl(path / "eval.jsonl")
        self.mismatch = Jsonl(path / "mismatch.jsonl")
        self.watch = Jsonl(path / "watch.jsonl")
        self.failed = Jsonl(path / "failed_rewards.jsonl")
        self.forecast = Jsonl(path / "forecast.jsonl")
        self.forgetting = Jsonl(path / "forgetting.jsonl")
        self.timeline = Jsonl(path / "timeline.jsonl")
        self.restarts = Jsonl(path / "restarts.jsonl")
        self.trajectories = JsonlZst(path / "trajectories.jsonl.zst")

    @classmethod
    def create(cls, path: Path, recipe: str) -> RunFolder:
        """Make the folder of a new run, with ``recipe`` (TOML) and an empty folder of checkpoints. Raises
        ValueError if ``path`` has more than ``EARLY_ENTRIES``, or is not writable."""
        if path.exists() and (
            not path.is_dir() or any(entry.name not in EARLY_ENTRIES for entry in path.iterdir())
        ):
            raise ValueError(
                f"run folder {path} is not empty; name another one or run: ostinato resume {path}"
            )
        run = cls(path)
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            atomic_write(run.recipe, recipe)
        except OSError as error:
            raise _explain_unwritable(path, error) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run in ``path``. Raises ValueError if there is none."""
        run = cls(path)
        if not run.recipe.is_file():
            folders = sorted(
                str(file.parent) for depth in ("*", "*/*") for file in path.glob(f"{depth}/recipe.toml")
            )
            suffix = f" and {len(folders) - 8} more" if len(folders) > 8 else ""
            hint = f"; there are {', '.join(folders[:8])}{suffix} below it" if folders else ""
            raise ValueError(
                f"run folder {path} holds no recipe.toml; name the folder of a started run{hint}"
            )
        return run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row to metrics.jsonl (the MetricWriter protocol)."""
        self.metrics.append({"step": step, **metrics})

    def truncate_after(self, step: int) -> None:
        """Delete the rows and the folders in ``scored`` of later steps, which a resumed run writes again, and
        the failed rewards that stopped the run. The ledger keeps its rows: they were paid for."""
        for log in self._logs:
            log.keep(lambda row: row.get("step", step) <= step)
        for folder in self.scored.glob("*"):
            if not "step-" <= folder.name <= f"step-{step:08d}":  # a hidden one is half written
                shutil.rmtree(folder)
        self.failed.keep(lambda row: row["step"] <= step and not row["stopped"])

    def sweep(self) -> None:
        """Remove temporary files that a killed process left. Only the holder of the folder's lock may call
        this. Checkpoints are repaired by ``train.checkpoint``."""
        complete = (self.recipe, self.history, *(log.path for log in (*self._logs, self.failed)))
        leftovers = [path for target in complete for path in self.path.glob(f".{target.name}.*")]
        for path in (*leftovers, *self.adapter.glob(".*")):
            path.unlink(missing_ok=True)

    @property
    def _logs(self) -> tuple[Jsonl | JsonlZst, ...]:
        """The logs whose rows a resumed run writes again."""
        logs = (self.metrics, self.eval, self.mismatch, self.watch)
        return (*logs, self.forecast, self.forgetting, self.trajectories)


def new_run_path(root: Path, recipe: str, now: datetime | None = None) -> Path:
    """Make the empty folder ``root/<recipe>-<yyyymmdd-hhmmss>``, with -2, -3 ... if that name is taken, so
    that no other run gets it. Raises ValueError where no folder can be made."""
    stem = f"{recipe}-{now or datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        path = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise _explain_unwritable(path, error) from error
    raise AssertionError("numbers have an end")


def _explain_unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"run folder {path} cannot be written ({error}); set log.dir to a folder that can")
