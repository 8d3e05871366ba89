"""TRL's GRPOTrainer as a contender of ``bench train``; run by the Python of TRL's own environment.

argv: JSON with folder, dtype, prompts (texts), group, new_tokens, steps, batch (per device). Prints one JSON
object: {"ready", "step_s": [...], "peak_mb"}. Every completion has exactly ``new_tokens`` tokens, and
32 of them make one optimizer step at any ``batch``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    import datasets
    import peft
    import torch
    import transformers
    import trl

    class Steps(transformers.TrainerCallback):
        """Seconds from one optimizer step to the next, generation included."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_begin(self, args, state, control, **kwargs) -> None:
            self.ends.append(time.perf_counter())

        def on_step_end(self, args, state, control, **kwargs) -> None:
            self.ends.append(time.perf_counter())

    completions = len(task["prompts"]) * task["group"]
    config = trl.GRPOConfig(
        output_dir=task["output"], use_cpu=True, bf16=False, beta=0.0, temperature=1.0,
        num_generations=task["group"], max_completion_length=task["new_tokens"],
        generation_kwargs={"min_new_tokens": task["new_tokens"]},
        per_device_train_batch_size=task["batch"], gradient_accumulation_steps=completions // task["batch"],
        max_steps=task["steps"], learning_rate=1e-5, save_strategy="no", report_to="none", logging_steps=1,
        gradient_checkpointing=task["gradient_checkpointing"],
        model_init_kwargs={"dtype": getattr(torch, task["dtype"])}, disable_tqdm=True,
    )  # fmt: skip
    steps = Steps()
    rows = [{"prompt": text} for text in task["prompts"]] * (task["steps"] + 1)
    trainer = trl.GRPOTrainer(
        model=task["folder"], args=config, train_dataset=datasets.Dataset.from_list(rows),
        reward_funcs=lambda completions, **kwargs: [float(len(set(text))) for text in completions],
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[steps],
    )  # fmt: skip
    trainer.train()
    step_s = [after - before for before, after in zip(steps.ends, steps.ends[1:], strict=False)]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    answers.write(json.dumps({"ready": versions, "step_s": step_s, "peak_mb": peak_mb}) + "\n")


if __name__ == "__main__":
    main()
