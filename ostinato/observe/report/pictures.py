"""PNG files under pictures/ of a run folder, which are embedded in its report."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST, MOST_BYTES = 12, 1_000_000  # pictures in a report; bytes of one file
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """``shown``: (name, data URL of the picture). ``left_out``: "NAME (why)"."""

    shown: Sequence[tuple[str, str]] = ()
    left_out: Sequence[str] = ()


def read_pictures(folder: Path) -> Pictures:
    """The first ``MOST`` by name. Files that are too large or not PNG go to ``left_out``."""
    shown: list[tuple[str, str]] = []
    left_out: list[str] = []
    for path in sorted(folder.glob("*.png")):
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= MOST_BYTES else b""
        if len(shown) == MOST or not data.startswith(PNG):
            why = f"more than {MOST}" if len(shown) == MOST else "no PNG" if data else "too large or empty"
            left_out.append(f"{path.name} ({why})")
        else:
            shown.append((path.stem, f"data:image/png;base64,{base64.b64encode(data).decode()}"))
    return Pictures(shown=shown, left_out=left_out)
