"""A context that is kept within a budget of tokens: mask, allocate, refill (docs/memory.md)."""
