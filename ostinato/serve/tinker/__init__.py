"""A server for the Tinker SDK: a loop that its client writes, on this engine and trainer (docs/tinker.md)."""
