"""Pairs of answers for ``dpo.toml``: sums with the right answer as chosen, one that is near as rejected.

python recipes/preference_rows.py [FILE] [ROWS]      preferences.jsonl with 1024 rows
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from ostinato.env.tasks import load_tasks


def write(file: Path, count: int, seed: int = 0) -> None:
    """``count`` rows in TRL's form."""
    draw = random.Random(seed)
    prompts = load_tasks("arithmetic", "train", seed, count, {"families": ["sum"]})
    with file.open("w", encoding="utf-8") as out:
        for prompt in prompts:
            right = int(prompt.columns["answer"])
            wrong = right + draw.choice([-10, -2, -1, 1, 2, 10])
            answers = {"chosen": right, "rejected": wrong}
            row = {name: [{"role": "assistant", "content": str(one)}] for name, one in answers.items()}
            out.write(json.dumps({"prompt": list(prompt.messages or ()), **row}) + "\n")


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    write(Path(given.get(0, "preferences.jsonl")), int(given.get(1, 1024)))
