"""The figures of ``ostinato bench experts`` in a page of prose, between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.settings import Clock
from ostinato.run import atomic_write

MARK = "<!-- bench experts -->"  # what stands between two of these is written by the command


def write_page(result: Mapping[str, Any], page: Path) -> None:
    """Put the figures between the marks of ``page``. Raises ValueError where it has no two of them."""
    parts = page.read_text().split(MARK)
    if len(parts) != 3:
        raise ValueError(f"{page} has {MARK} {len(parts) - 1} times; it needs two, around the figures")
    text = "\n\n".join((_recorded(result), _drawn(result), _timed(result)))
    atomic_write(page, MARK.join((parts[0], f"\n\n{text}\n\n", parts[2])).encode())


def _recorded(result: Mapping[str, Any]) -> str:
    found = result["recorded"]
    names = ("straggler", "worst_layer", "bound", "ranks_per_token")
    rows = [[row["ranks"], row["placement"], *_three(row, *names), row["moved"]] for row in found["factors"]]
    head = ["expert ranks", "experts", "straggler", "worst layer", "bound", "ranks of a token", "moved"]
    return (
        f"**Recorded.** {found['tokens']:,} tokens of {found['steps']} steps of "
        f"`{result['settings']['recipe']}`, {found['experts']} experts, judged by the second half of the "
        f"steps:\n\n{_markdown(head, rows)}"
    )


def _drawn(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    rows = [
        [row["ranks"], row["placement"], *_three(row, "straggler"), f"{row['low']:.2f} to {row['high']:.2f}"]
        for row in result["drawn"]
    ]
    head = ["expert ranks", "experts", "straggler", "5 to 95 % of draws"]
    return (
        f"**Drawn.** {settings['experts']} experts of log-normal({settings['sigma']:g}) popularity, "
        f"{settings['draws']} draws, placed by {settings['tokens']:,} tokens and judged by as many others:"
        f"\n\n{_markdown(head, rows)}"
    )


def _timed(result: Mapping[str, Any]) -> str:
    settings, here = result["settings"], result["machine"]
    clock = "on the wall" if settings["clock"] == Clock.WALL else "of processor time"
    rows = [
        [
            f"{row['name']}, {row['hidden']} x {row['width']}",
            *_three(row, "straggler", "straggler_placed"),
            f"{1e3 * row['time']['base_s']:.0f}",
            f"{1e3 * row['time']['other_s']:.0f}",
            f"{row['time']['ratio']:.3f} [{row['time']['low']:.3f}, {row['time']['high']:.3f}]",
            f"{row['straggler_placed'] / row['straggler']:.3f}",
        ]
        for row in result["timed"]
    ]
    head = ["routes, hidden x width", "straggler", "placed", "ms", "ms placed", "ratio [95 %]", "predicted"]
    return (
        f"**Timed.** Mixture layers forward and backward on two ranks, {2 * settings['rows']:,} rows, "
        f"{settings['rounds']} rounds, milliseconds {clock} ({here['processor']}, {here['cores']} cores, "
        f"load {here['load_average']}):\n\n{_markdown(head, rows)}"
    )


def _three(row: Mapping[str, Any], *names: str) -> list[str]:
    return [f"{row[name]:.3f}" for name in names]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


__all__ = ["MARK", "write_page"]
