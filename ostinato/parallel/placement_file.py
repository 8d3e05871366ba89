"""A placement of experts as a file: what ``ostinato place`` writes and ``parallel.placement`` names."""

from __future__ import annotations

from pathlib import Path

from ostinato.inputs import parse_json
from ostinato.parallel.layout import Layout
from ostinato.parallel.shares import Placement
from ostinato.run import atomic_write, to_json


def write(path: Path, placement: Placement) -> None:
    ranks = len(placement[0])
    atomic_write(path, (to_json({"ranks": ranks, "experts": placement}) + "\n").encode())


def read(path: Path, ranks: int) -> Placement:
    """What ``write`` wrote. Raises ValueError where it is no such file, or for other ranks."""
    try:
        found = parse_json(path.expanduser().read_text())
        written, experts = int(found["ranks"]), found["experts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"parallel.placement is {str(path)!r}, which is no placement ({error}); "
            "make one with ostinato place"
        ) from None
    if written != ranks:
        raise ValueError(
            f"parallel.placement is {str(path)!r}, for {written} expert ranks, and the layout has {ranks}; "
            f"make one with ostinato place --ranks {ranks}"
        )
    return tuple(tuple(tuple(kept) for kept in layer) for layer in experts)


def read_placement(path: str, layout: Layout) -> Placement | None:
    """Of the recipe's ``parallel.placement``; None where it names none."""
    return read(Path(path), layout.expert) if path else None


__all__ = ["read", "read_placement", "write"]
