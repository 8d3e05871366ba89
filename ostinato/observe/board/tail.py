"""The rows appended to a log since the last read: by byte offsets, so that no byte is read twice.

A log may grow, be on a remote disk, and be replaced by a shorter one when its run is resumed. Nothing here
writes, locks or waits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ostinato.inputs import parse_json

CHUNK = 8 << 20  # bytes read at once, so that the first answer comes soon
MOST = 1 << 28  # bytes of a frame's content that are looked at
WITNESS = 64  # bytes before the offset, by which a log is recognised


class Mark:
    """How far a log has been read, and what it is recognised by: inode and the last bytes read."""

    def __init__(self) -> None:
        self.offset, self._before, self._inode = 0, b"", -1

    @property
    def begun(self) -> bool:
        return self._inode != -1

    def known(self, file: BinaryIO) -> bool:
        """Is it the same log as before, perhaps longer by now?"""
        file.seek(self.offset - len(self._before))
        same = file.read(len(self._before)) == self._before
        return same and os.fstat(file.fileno()).st_ino == self._inode

    def put(self, file: BinaryIO, offset: int) -> None:
        start = max(0, offset - WITNESS)
        file.seek(start)
        self.offset, self._before = offset, file.read(offset - start)
        self._inode = os.fstat(file.fileno()).st_ino


class Tail:
    """The complete rows of a JSON-lines log, each of them once, up to a line that is not a JSON object."""

    def __init__(self, path: Path, *, last: int | None = None) -> None:
        """``last``: start that many bytes before the current end of the file."""
        self.path = path
        self.damaged = False  # does it have a line that is not JSON? Perhaps only a remote disk lags behind
        self.left = 0  # bytes that are not read yet
        self._last, self._mark = last, Mark()

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(was the log replaced: if so, discard its earlier rows; its next rows: all of them, or ``CHUNK``
        bytes of them, see ``left``)."""
        try:
            with self.path.open("rb") as file:
                anew = not self._mark.known(file)
                size = file.seek(0, os.SEEK_END)
                start = self._beginning(file, size) if anew else self._mark.offset
                rows, stop = self._rows(file, start)
                self._mark.put(file, stop)
                self.left = max(0, size - stop) if rows else 0
                return anew, rows
        except FileNotFoundError:
            anew, self._mark, self.left = self._mark.begun, Mark(), 0
            return anew, []

    def _beginning(self, file: BinaryIO, size: int) -> int:
        """The offset to start at: after the first line end in the last ``last`` bytes."""
        if self._last is None or size <= self._last:
            return 0
        file.seek(size - self._last)
        return file.tell() + len(file.readline())

    def _rows(self, file: BinaryIO, start: int) -> tuple[list[dict[str, Any]], int]:
        """The rows from offset ``start`` on, and the offset where they end."""
        file.seek(start)
        data = file.read(CHUNK)
        while data and b"\n" not in data and (more := file.read(CHUNK)):  # a line longer than a chunk
            data += more
        found, self.damaged = [], False
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # torn, or not written in full yet
            if (row := _object(line)) is None:
                self.damaged = True
                break
            found.append(row)
            start += len(line)
        return found, start


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line, surrogates=True)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


# ---- a log in zstd frames


@dataclass(frozen=True, slots=True)
class Frame:
    """A zstd frame of trajectories.jsonl.zst, written by one step."""

    offset: int
    size: int  # bytes
    step: int


class Frames:
    """Offsets and steps of the frames of trajectories.jsonl.zst, found without decompressing them in full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames: list[Frame] = []
        self._mark = Mark()

    def refresh(self) -> None:
        """Look for frames after those that are known; start over if the log was replaced."""
        try:
            with self.path.open("rb") as file:
                if not self._mark.known(file):
                    self.frames, self._mark = [], Mark()
                self.frames += _frames(file, self._mark.offset, file.seek(0, os.SEEK_END))
                end = self.frames[-1].offset + self.frames[-1].size if self.frames else 0
                self._mark.put(file, end)
        except FileNotFoundError:
            self.frames, self._mark = [], Mark()

    def rows(self, frame: Frame) -> list[dict[str, Any]]:
        """The trajectories of a frame; empty if it can no longer be read there."""
        import zstandard

        try:
            with self.path.open("rb") as file:
                file.seek(frame.offset)
                data = _expanded(file.read(frame.size), MOST)
        except (OSError, zstandard.ZstdError):
            return []
        return [row for line in data.splitlines() if (row := _object(line)) is not None]


def _frames(file: BinaryIO, start: int, stop: int) -> Iterator[Frame]:
    """The complete frames of [start, stop), by the sizes of their blocks (RFC 8878, section 3.1.1)."""
    while start < stop and (size := _frame_size(file, start)) and start + size <= stop:
        step = _step(file, start, size)
        if step is None:
            return
        yield Frame(offset=start, size=size, step=step)
        start += size


def _frame_size(file: BinaryIO, start: int) -> int:
    """Size in bytes of the frame at ``start``; 0 if it is torn or not a frame."""
    import zstandard

    file.seek(start)
    head = file.read(18)  # the longest possible header
    try:
        at = zstandard.frame_header_size(head)
        checksum = zstandard.get_frame_parameters(head).has_checksum
    except zstandard.ZstdError:
        return 0
    while True:
        file.seek(start + at)
        if len(block := file.read(3)) < 3:
            return 0
        header = int.from_bytes(block, "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == 3:
            return 0
        at += 3 + (1 if kind == 1 else size)  # 1: one byte, repeated
        if last:
            return at + 4 * checksum


def _expanded(data: bytes, most: int) -> bytes:
    """The first ``most`` bytes of a frame's content: a small frame may hold any number of them. Raises
    ZstdError."""
    import zstandard

    content = bytearray()
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        while len(content) < most and (part := reader.read(min(1 << 20, most - len(content)))):
            content += part
    return bytes(content)


_STEP = re.compile(rb'^\{"step":(\d+),')


def _step(file: BinaryIO, start: int, size: int, most: int = 1 << 17) -> int | None:
    """The step of the frame's first row, read from its first bytes; None if it does not begin with one."""
    import zstandard

    file.seek(start)
    try:
        head = _expanded(file.read(min(size, most)), 64)
    except zstandard.ZstdError:
        return None
    found = _STEP.match(head)
    return int(found[1]) if found else None
