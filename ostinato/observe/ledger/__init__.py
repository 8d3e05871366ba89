"""What a run costs: ledger.jsonl, which is only ever appended to, and the sums over it (docs/ledger.md).

    start   a process takes up the run: pools of devices, price, the step it goes on from
    step    a training step: seconds, busy and idle by pool; tokens; FLOPs, useful or wasted and why
    eval    a held-out measurement: the same, apart from training
    save    a checkpoint
    lost    work that was given up; that of a killed process is recorded by the one that resumes
    end     a process leaves the run, and why

Device seconds are devices times wall seconds, whatever the devices did: what is neither busy in a row nor in
a row at all (loading, between rows) is idle. Only seconds between a kill and the process that resumes
are in no session. A step that is done again has several rows: the last one counts, the others are waste
("repeated"), but for the sampling that the last one reuses ("reused"). A step pays for the sampling that it
does for later ones, as "pending"; the row of the step that trains on it has what became of it and
as much less pending. FLOPs are whole numbers, so that useful, wasted and pending add up to all of them
exactly. Every row has its own devices and price.
"""

from ostinato.observe.ledger.life import BEAT_EVERY_S, Life
from ostinato.observe.ledger.rows import Event, Spell, checked, read, spells
from ostinato.observe.ledger.sums import AXES, Summary, priced, spent, summary
from ostinato.observe.ledger.write import POOL, Ledger, SteadyClock, Terms, new_life

__all__ = [
    "AXES",
    "BEAT_EVERY_S",
    "POOL",
    "Event",
    "Ledger",
    "Life",
    "Spell",
    "SteadyClock",
    "Summary",
    "Terms",
    "checked",
    "new_life",
    "priced",
    "read",
    "spells",
    "spent",
    "summary",
]
