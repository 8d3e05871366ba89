"""Physical memory of this process, as the kernel counts it: a page that n processes map is 1 / n of each."""

from __future__ import annotations

import re
from pathlib import Path

_ROLLUP, _MAPS = Path("/proc/self/smaps_rollup"), Path("/proc/self/smaps")


def proportional() -> int:
    """Bytes: the proportional set size (PSS) of all that is mapped. Summed over processes, every page counts
    once; but libraries that strangers use too count only in part."""
    return _sum("Pss", _ROLLUP.read_text())


def mapped(path: Path) -> tuple[int, int]:
    """(PSS, private) bytes of what is mapped of the file ``path``. Private: pages that this process wrote to,
    and got a copy of."""
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", _MAPS.read_text())
    own = [part for part in parts if part.partition("\n")[0].endswith(f" {path}")]
    return sum(_sum("Pss", part) for part in own), sum(_sum("Anonymous", part) for part in own)


def _sum(field: str, text: str) -> int:
    return sum(int(kilobytes) << 10 for kilobytes in re.findall(rf"(?m)^{field}: +(\d+) kB$", text))
