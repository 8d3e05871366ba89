"""vLLM with one of its draft methods, or none, as a contender of ``bench.vllm_drafts``: run by the Python of
vLLM's own environment. It imports nothing of ours; vLLM itself loads the proposer that its settings name.

argv: the arguments of vllm.LLM as a JSON object. Then one per line: {"prompts": [[ids]], "temperature": t,
"new_tokens": n} in, {"seconds": s, "answers": [[ids]], "drafted": n, "accepted": n} out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # vLLM prints on stdout; the answers go to a copy of it that nothing else knows
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    engine = vllm.LLM(**json.loads(sys.argv[1]))
    answers.write(json.dumps({"ready": f"vllm {vllm.__version__}"}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(rollout(engine, json.loads(line))) + "\n")


def rollout(engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    """The answers to ``task`` and what they took. Without seeds: they would cost a loop over requests."""
    import vllm

    sampling = vllm.SamplingParams(
        temperature=task["temperature"], max_tokens=task["new_tokens"], detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    before, start = _drafts(engine), time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds, after = time.perf_counter() - start, _drafts(engine)
    return {
        "seconds": seconds,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": after["draft"] - before["draft"],
        "accepted": after["accepted"] - before["accepted"],
    }


def _drafts(engine: Any) -> dict[str, int]:
    """vLLM's own counters, since the engine began."""
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    found = {name: metrics.get(f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted")}
    return {name: int(metric.value) if metric else 0 for name, metric in found.items()}


if __name__ == "__main__":
    main()
