"""Rows for ``race_smollm.toml``: sums of two digits, of which two in five are right and the others near.

python lab/recipes/sums_rows.py sums.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from ostinato.env.arithmetic import draw_prompts

ROWS, RIGHT, OFF_BY = 1024, 0.4, (-10, -2, -1, 1, 2, 10)


def main(path: Path) -> None:
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for prompt in draw_prompts("train", 1, ROWS, families=["sum"], digits=2):
            answer = int(prompt.columns["answer"])
            if rng.random() >= RIGHT:
                answer += rng.choice(OFF_BY)
            completion = [{"role": "assistant", "content": f"#### {answer}"}]
            file.write(f"{json.dumps({'prompt': list(prompt.messages or ()), 'completion': completion})}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
