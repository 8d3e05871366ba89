"""Benchmarks: ours and the peers side by side in one run, A B A B, medians, as a table and as JSON.

Every contender is a process of its own, with its own Python where it needs one, that answers one task at a
time; while one works the others sleep. A peer gets the setting of threads that suits it best, found by a
short probe.
"""

from lab.app import app

__all__ = ["app"]
