"""What a run costs: ledger.jsonl, which is append-only, and the sums over it (docs/ledger.md).

    start   a process starts or resumes the run: pools of devices, price, the step it continues from
    step    a training step: seconds, busy and idle by pool; tokens, and why they were not trained on; FLOPs
    eval    a held-out evaluation: the same, kept apart from training
    end     a process ends, and why; where an exception ended it, the seconds of the work that was lost

Device seconds are devices times wall seconds, whatever the devices did: time that is not busy in a row, or is
in no row (loading, between rows), is idle. What a killed process did after its last row is unknown, at most
until the next start, and in no sum. A step that is repeated has several rows: the last one counts, the others
are waste. A row has the tokens that its process sampled during it, for whichever step: what an earlier row
has, a step that trains on it does not count again. What was sampled and neither trained on nor dropped is
"unused". Every row has its own devices and price.
"""

from ostinato.observe.ledger.rows import Event, Spell, check_ledger, find_fault, read, spells
from ostinato.observe.ledger.sums import AXES, Summary, set_price, spent, summary
from ostinato.observe.ledger.write import POOL, Ledger, SteadyClock, Terms

__all__ = [
    "AXES",
    "POOL",
    "Event",
    "Ledger",
    "Spell",
    "SteadyClock",
    "Summary",
    "Terms",
    "check_ledger",
    "find_fault",
    "read",
    "set_price",
    "spells",
    "spent",
    "summary",
]
