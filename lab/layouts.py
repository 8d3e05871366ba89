"""Layout independence: the same trainings over every layout, against one process.

    python -m ostinato bench layouts --write docs/parallel.md

Each layout's ranks are processes of this host that talk over gloo. What is compared after so many optimizer
steps: the largest relative difference of a loss, and of what is trained: the 2-norm of the difference over
that of all tensors together (and, in the JSON, of the worst tensor).
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.layout_runs import MODELS, WAYS, Case, Run, trained_all
from ostinato.parallel.layout import Layout

LAYOUTS = (
    *("d2", "t2", "p2", "c2", "d2e2", "t2x2", "d2f2"),
    *("d2t2", "t2p2", "t2c2", "d2p2v2", "p4", "d2c2e4", "d2t2e2x2", "d4e2f2"),
    *("d2t2p2", "d2t2c2e4", "d4t2e8f2", "t2p2c2e4", "d2t2p2e2v2"),
)
TIMEOUT_S = 600.0
DOUBLE_STEPS = 2  # a mistake shows in the first ones, and rounding in none
BEGIN, END = "<!-- layouts -->", "<!-- /layouts -->"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of a run from another one: the largest relative differences."""

    loss: float
    tensors: float  # of the worst tensor
    together: float  # of all tensors as one vector


def difference(run: Run, other: Run) -> Difference:
    """See the module; of the parameters that are trained. Raises ValueError for runs of other tensors."""
    names = [name for name in other.tensors if name.startswith("parameters.")]
    if run.tensors.keys() != other.tensors.keys():
        raise ValueError("the runs have trained different tensors; compare those of one case")
    losses = [abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True)]
    apart = [float((run.tensors[n] - other.tensors[n]).norm() / other.tensors[n].norm()) for n in names]
    joined, wanted = (torch.cat([one.tensors[n].flatten() for n in names]) for one in (run, other))
    together = float((joined - wanted).norm() / wanted.norm())
    return Difference(loss=max(losses), tensors=max(apart), together=together)


def cases(steps: int) -> list[Case]:
    return [Case(model=model, way=way, steps=steps) for model in MODELS for way in WAYS]


def run(layouts: Sequence[str], steps: int, say: Say) -> dict[str, Any]:
    """Everything, in fp32 and in fp64."""
    singles = cases(steps)
    doubles = [replace(case, dtype=torch.float64, steps=min(steps, DOUBLE_STEPS)) for case in singles]
    alone = trained_all(0, 1, "1", singles + doubles)
    rows = []
    for layout in layouts:
        started = time.perf_counter()
        (found, *_) = on_ranks(Layout.parse(layout).world, trained_all, layout, singles + doubles)
        apart = [difference(one, other) for one, other in zip(found, alone, strict=True)]
        half = len(singles)
        rows.append(
            {
                "layout": layout,
                "ranks": Layout.parse(layout).world,
                "seconds": time.perf_counter() - started,
                "fp32": {str(case): _numbers(one) for case, one in zip(singles, apart[:half], strict=True)},
                "fp64": {str(case): _numbers(one) for case, one in zip(singles, apart[half:], strict=True)},
            }
        )
        worst = {dtype: _worst(rows[-1][dtype]) for dtype in ("fp32", "fp64")}
        say(
            f"{layout}: "
            + ", ".join(f"{dtype} {loss:.1e} {apart:.1e}" for dtype, (loss, apart) in worst.items())
        )
    return {"steps": steps, "rows": rows}


def _numbers(one: Difference) -> dict[str, float]:
    return {"loss": one.loss, "tensors": one.tensors, "together": one.together}


def _worst(found: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    return max(one["loss"] for one in found.values()), max(one["together"] for one in found.values())


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a row for a layout, a column for a case (losses / tensors, fp32), and the worst in fp64."""
    names = [*result["rows"][0]["fp32"]]
    lines = [
        "| layout | ranks | " + " | ".join(names) + " | fp64, worst |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for row in result["rows"]:
        cells = [f"{row['fp32'][name]['loss']:.0e} / {row['fp32'][name]['together']:.0e}" for name in names]
        loss, apart = _worst(row["fp64"])
        lines.append(
            f"| `{row['layout']}` | {row['ranks']} | " + " | ".join(cells) + f" | {loss:.0e} / {apart:.0e} |"
        )
    return "\n".join(lines) + "\n"


def write(result: Mapping[str, Any], page: Path) -> None:
    """Put the table between its marks. Raises ValueError for a page without them."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}; put them where the table belongs")
    page.write_text(f"{before}{BEGIN}\n{table(result)}{END}{after}", encoding="utf-8")


def on_ranks(n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, n, *args)`` in n processes of this host with torch.distributed over gloo, by rank.
    Raises RuntimeError where one of them fails; none is left behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, n, f"{folder}/store", theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            found = [_answer(rank, pipe) for rank, (_, pipe) in enumerate(started)]
            for process, _ in started:  # all have answered: they end by themselves, together
                process.join(TIMEOUT_S)
            return found
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def _answer(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise RuntimeError(f"rank {rank} said nothing for {TIMEOUT_S:g} s")
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError as error:
        raise RuntimeError(f"rank {rank} died; what it said is above") from error


def _rank(
    rank: int, n: int, store: str, pipe: Connection, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    found = function(rank, n, *args)
    pipe.send_bytes(pickle.dumps(found if rank == 0 else None))
    dist.barrier()


__all__ = ["LAYOUTS", "Difference", "cases", "difference", "on_ranks", "run", "table", "write"]
