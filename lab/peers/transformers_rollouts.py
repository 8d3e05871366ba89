"""``transformers.generate`` as a contender of ``bench rollouts``; imports nothing of ours.

argv: model folder, dtype. The protocol is that of ``vllm_rollouts.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    import transformers

    folder, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    answers.write(json.dumps({"ready": f"transformers {transformers.__version__}"}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        ids = torch.tensor(task["prompts"])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                min_new_tokens=task["new_tokens"], max_new_tokens=task["new_tokens"], pad_token_id=0,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        tokens = out.shape[0] * (out.shape[1] - ids.shape[1])
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
