"""vLLM as a contender of ``bench rollouts``: run by the Python of vLLM's own environment, so it imports
nothing of ours.

argv: model folder, dtype, context length. Then one JSON object per line: {"prompts": [[ids]],
"new_tokens": n, "seed": s} in, {"seconds": s, "tokens": n} out.
"""

from __future__ import annotations

import json
import os
import sys
import time

if (
    os.environ.get("OSTINATO_MAX_ISA") == "avx2"
):  # vLLM takes the processor from torch, which no variable caps
    import torch

    torch.cpu._is_avx512_supported = lambda: False
    torch.cpu._is_avx512_bf16_supported = lambda: False


def main() -> None:
    # vLLM prints on stdout; the answers go to a copy of it that nothing else knows
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    folder, dtype, context = sys.argv[1], sys.argv[2], int(sys.argv[3])
    engine = vllm.LLM(
        model=folder, dtype=dtype, max_model_len=context, enable_prefix_caching=False, max_num_seqs=256,
        disable_log_stats=True, gpu_memory_utilization=0.25,  # of the memory: room for its KV cache beside us
    )  # fmt: skip
    answers.write(json.dumps({"ready": f"vllm {vllm.__version__}"}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=task["new_tokens"], min_tokens=task["new_tokens"], ignore_eos=True,
            seed=None, detokenize=False,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
