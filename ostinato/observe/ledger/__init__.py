"""What a run costs: ledger.jsonl, which is append-only, and the sums over it (docs/ledger.md).

    start   a process starts or resumes the run: pools of devices, price, the step it continues from
    step    a training step: seconds, busy and idle by pool; tokens; FLOPs, useful or wasted and why
    eval    a held-out evaluation: the same, kept apart from training
    save    a checkpoint
    lost    work that was lost; that of a killed process is recorded by the one that resumes
    end     a process ends, and why

Device seconds are devices times wall seconds, whatever the devices did: time that is not busy in a row, or is
in no row (loading, between rows), is idle. Only the seconds between a kill and the process that resumes
are in no session. A step that is repeated has several rows: the last one counts, the others are waste
("repeated"), except for the sampling that the last one reuses ("reused"). A step pays for the sampling that
it does for later steps, as "pending"; the row of the step that trains on it says what became of it and
subtracts it from pending. FLOPs are whole numbers, so that useful, wasted and pending add up to all of them
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
