"""What a log has gained since it was last looked at: by byte offsets, so that no byte is read twice.

A log may be growing, on a disk far away, and be replaced by a shorter one when its run is resumed. Nothing
here writes, locks or waits.
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
WITNESS = 64  # bytes before the offset, by which a log is known again
PATIENCE = 5  # looks at a line that is no JSON, before it is passed over: a far disk may be behind


class Tail:
    """The complete rows of a JSON-lines log, each of them once."""

    def __init__(self, path: Path, *, last: int | None = None) -> None:
        """``last``: begin so many bytes before the end of what is there."""
        self.path = path
        self.damaged = 0  # lines that were passed over
        self._last = last
        self._forget()

    def _forget(self) -> None:
        self._offset, self._witness, self._inode, self._tries = 0, b"", -1, 0
        self.left = 0  # bytes that are there and not read yet

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(is this another log than before: forget its rows, its next rows: all there are, or ``CHUNK``
        bytes of them; see ``left``)."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                anew = not self._known(file, status)
                if anew:
                    self._forget()
                    self._inode = status.st_ino
                    self._offset = self._beginning(file, status.st_size)
                return anew, self._rows(file, status.st_size)
        except FileNotFoundError:
            anew = self._inode != -1
            self._forget()
            return anew, []

    def _known(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Is it the log that we have read so far, perhaps longer by now?"""
        if self._inode == -1 or status.st_size < self._offset or status.st_ino != self._inode:
            return False
        file.seek(self._offset - len(self._witness))
        return file.read(len(self._witness)) == self._witness

    def _beginning(self, file: BinaryIO, size: int) -> int:
        """Where to begin: behind the first line end of the last ``last`` bytes."""
        if self._last is None or size <= self._last:
            return 0
        file.seek(size - self._last)
        return file.tell() + len(file.readline())

    def _rows(self, file: BinaryIO, size: int) -> list[dict[str, Any]]:
        file.seek(self._offset)
        data = file.read(CHUNK)
        while data and b"\n" not in data and (more := file.read(CHUNK)):  # a line longer than a chunk
            data += more
        found, consumed = [], 0
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # torn, or not all there yet
            if (row := _object(line)) is not None:
                found.append(row)
            elif self._tries < PATIENCE:
                self._tries += 1
                break
            else:
                self.damaged += 1
            self._tries = 0
            consumed += len(line)
        if consumed:
            self._offset += consumed
            self._witness = data[max(0, consumed - WITNESS) : consumed]
        self.left = max(0, size - self._offset) if consumed else 0
        return found


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line, surrogates=True)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


# ---- a log in zstd frames


@dataclass(frozen=True, slots=True)
class Frame:
    """What one step has added to trajectories.jsonl.zst."""

    offset: int
    size: int  # bytes
    step: int


class Frames:
    """Where the frames of trajectories.jsonl.zst are, and of which step: found without inflating them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames: list[Frame] = []
        self._inode, self._witness = -1, b""

    def refresh(self) -> None:
        """Look for frames behind those that are known; all anew where the log is another one."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or self._last_bytes(file) != self._witness:
                    self._inode, self.frames = status.st_ino, []
                self.frames += _frames(file, self._end, status.st_size)
                self._witness = self._last_bytes(file)
        except FileNotFoundError:
            self._inode, self.frames = -1, []

    @property
    def _end(self) -> int:
        return self.frames[-1].offset + self.frames[-1].size if self.frames else 0

    def _last_bytes(self, file: BinaryIO) -> bytes:
        """Of what is known: the same as before in a log that has only grown."""
        file.seek(max(0, self._end - WITNESS))
        return file.read(min(WITNESS, self._end))

    def rows(self, frame: Frame) -> list[dict[str, Any]]:
        """The trajectories of a frame; empty where it is not what it was."""
        import zstandard

        try:
            with self.path.open("rb") as file:
                file.seek(frame.offset)
                data = zstandard.ZstdDecompressor().decompressobj().decompress(file.read(frame.size))
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
    """Bytes of the frame there; 0 where it is torn or none."""
    import zstandard

    file.seek(start)
    head = file.read(18)  # the longest header there is
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


_STEP = re.compile(rb'^\{"step":(\d+),')


def _step(file: BinaryIO, start: int, size: int, most: int = 1 << 17) -> int | None:
    """The step of the frame's first row, from its first bytes; None where it begins otherwise."""
    import zstandard

    file.seek(start)
    try:
        head = zstandard.ZstdDecompressor().decompressobj().decompress(file.read(min(size, most)))
    except zstandard.ZstdError:
        return None
    found = _STEP.match(head)
    return int(found[1]) if found else None
