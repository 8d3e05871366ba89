"""Keys that recipes used to have.

Run folders of older versions name every key, so the value that meant "off" is dropped; any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# section.key -> (values that meant "off", what to do instead)
GONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "engine.layout": (
        ("", "1"),
        "the local engine samples in one process, and vLLM takes its own flags in engine.server_args, e.g. "
        '["--tensor-parallel-size", "2"]; drop it',
    ),
    "parallel.plan": (("",), "put it into the run folder with ostinato plan ... --record RUN; drop it"),
    "draft.run_ahead": ((False,), "idle rows of a pass stay idle; drop it"),
    "draft.leaves": ((1, 4), "a draft is one chain of tokens, and what is sampled is the same; drop it"),
    "parallel.replan": ((False,), "name a better layout when it is resumed; drop it"),
    "pipeline.late": (("wait",), "a step waits for a group that would become too old; remove the key"),
}


def without_gone(tree: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` without keys that are gone. Raises ValueError for one that is switched on."""
    kept = dict(tree)
    for name, (off, fix) in GONE.items():
        section, _, key = name.partition(".")
        keys = kept.get(section)
        if not isinstance(keys, Mapping) or key not in keys:
            continue
        if keys[key] not in off:
            raise ValueError(f"{name} is {keys[key]!r}, but this key is gone: {fix}")
        kept[section] = {other: value for other, value in keys.items() if other != key}
    return kept
