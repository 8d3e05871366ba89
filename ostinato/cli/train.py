"""``ostinato train`` and ``resume``: run, then tell what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from ostinato.cli.report import write_report
from ostinato.launch.output import lasting
from ostinato.launch.progress import before_after
from ostinato.launch.ranks import follow, followed
from ostinato.launch.session import Outcome, learn
from ostinato.launch.session import resume as resume_run
from ostinato.observe.report.verdicts import failed_rewards, unsolved
from ostinato.pipeline.signals import Ended
from ostinato.run import MAIN_SET, RunFolder

# signals: 128 + number, as in shells
EXIT = {"interrupted": 130, "terminated": 143, "hung_up": 129, "collapsed": 1}
HUNG_UP = "hung up (the terminal, or the reader of the output, is gone)"


def train(recipe: str, overrides: Sequence[str]) -> int:
    """Returns the exit code. Of several ranks that torchrun has started, all but the first follow."""
    if (place := followed()) is not None:
        return follow(place)
    return _finish(lambda: learn(recipe, *overrides))


def resume(run: Path, overrides: Sequence[str]) -> int:
    if (place := followed()) is not None:
        return follow(place)
    return _finish(lambda: resume_run(run, *overrides))


def _finish(work: Callable[[], Outcome]) -> int:
    error = lasting(sys.stderr)
    try:
        outcome = work()
    except KeyboardInterrupt as stop:
        why = stop.why if isinstance(stop, Ended) else "interrupted"
        how = {"hung_up": HUNG_UP, "interrupted": "stopped at once"}.get(why, why)
        print(f"ostinato: {how}; {str(stop) or 'nothing had begun'}", file=error)
        return EXIT[why]
    console = Console(file=lasting(sys.stdout))
    if outcome.after is not None:
        console.print(before_after(outcome.before, outcome.after, outcome.greedy))
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    _tell_verdicts(RunFolder(outcome.folder), say)
    console.print(f"adapter      {RunFolder(outcome.folder).adapter}", highlight=False, soft_wrap=True)
    console.print(
        f"report       {write_report(RunFolder.open(outcome.folder))}", highlight=False, soft_wrap=True
    )
    if outcome.why == "hung_up":
        line = f"ostinato: {HUNG_UP} after step {outcome.step}; to go on: ostinato resume {outcome.folder}"
        print(line, file=error)
        return EXIT[outcome.why]
    if code := EXIT.get(outcome.why, 0):
        line = f"{outcome.why} after step {outcome.step}; to go on: ostinato resume {outcome.folder}"
        console.print(line, highlight=False, soft_wrap=True)
        return code
    if outcome.why == "replanned":
        line = f"stopped after step {outcome.step} for a better layout (replan.jsonl says why); to go on: "
        console.print(f"{line}{outcome.resume}", highlight=False, soft_wrap=True)
    if outcome.why == "enough":
        line = f"stopped after step {outcome.step}: by its own forecast the rest is not worth its compute; "
        line += f"to go on all the same: ostinato resume {outcome.folder} forecast.stop=false"
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _tell_verdicts(run: RunFolder, say: Callable[[str], None]) -> None:
    """Where nothing was ever solved, and each reward function that failed, with its last traceback."""
    if why := unsolved([row for row in run.eval.rows() if row.get("set") == MAIN_SET]):
        say(f"warning      {why}")
    for failed in failed_rewards(list(run.failed.rows())):
        say(
            "\n".join(
                part for part in (f"warning      {failed.sentence}", failed.trace, failed.answer) if part
            )
        )
