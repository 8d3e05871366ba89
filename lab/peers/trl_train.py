"""TRL's GRPOTrainer, or its SFTTrainer, as a contender of ``bench train``; run by the Python of TRL's own
environment.

argv: JSON with folder, dtype, output, batch (per device) and either prompts (texts), group, new_tokens and
steps: each completion has exactly ``new_tokens`` tokens, and 32 of them make one optimizer step at any batch;
or rows (a JSON file of input_ids and completion_mask), packing and pack (tokens of a packed row). Prints one
JSON object: {"ready", "step_s": [...], "peak_mb"}, for rows with "step_tokens", "tokens", the mean "loss".
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
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

    steps = Steps()
    autocast = task["dtype"] == "autocast"
    shared = {
        "output_dir": task["output"], "use_cpu": True, "bf16": autocast, "gradient_checkpointing": False,
        "per_device_train_batch_size": task["batch"], "learning_rate": 1e-5, "save_strategy": "no",
        "report_to": "none", "logging_steps": 1, "disable_tqdm": True,
        "model_init_kwargs": {"dtype": torch.float32 if autocast else getattr(torch, task["dtype"])},
    }  # fmt: skip
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    given = {"model": task["folder"], "peft_config": lora, "callbacks": [steps]}
    trainer = grpo(task, shared, given) if "prompts" in task else sft(task, shared, given)
    trainer.train()
    step_s = [after - before for before, after in zip(steps.ends, steps.ends[1:], strict=False)]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    found = {"ready": versions, "step_s": step_s, "peak_mb": peak_mb}
    if "rows" in task:
        logged = [row for row in trainer.state.log_history if "loss" in row]
        until = [0, *(int(row["num_tokens"]) for row in logged)]
        found |= {"step_tokens": [b - a for a, b in itertools.pairwise(until)], "tokens": until[-1]}
        found["loss"] = sum(row["loss"] for row in logged) / len(logged)
    answers.write(json.dumps(found) + "\n")


def grpo(task, shared, given):
    import datasets
    import trl

    completions = len(task["prompts"]) * task["group"]
    config = trl.GRPOConfig(
        **shared, beta=0.0, temperature=1.0, num_generations=task["group"],
        max_completion_length=task["new_tokens"], generation_kwargs={"min_new_tokens": task["new_tokens"]},
        gradient_accumulation_steps=completions // task["batch"], max_steps=task["steps"],
    )  # fmt: skip
    rows = [{"prompt": text} for text in task["prompts"]] * (task["steps"] + 1)
    return trl.GRPOTrainer(
        args=config, train_dataset=datasets.Dataset.from_list(rows),
        reward_funcs=lambda completions, **kwargs: [float(len(set(text))) for text in completions], **given,
    )  # fmt: skip


def sft(task, shared, given):
    import datasets
    import trl

    with open(task["rows"]) as file:
        rows = json.load(file)
    a_step = 2 if task["packing"] else 8  # of 2 x 1024 tokens, or about as many
    config = trl.SFTConfig(
        **shared, packing=task["packing"], max_length=task["pack"], completion_only_loss=True,
        gradient_accumulation_steps=a_step // task["batch"], num_train_epochs=1,
        train_sampling_strategy="random" if task["packing"] else "group_by_length",
    )  # fmt: skip
    return trl.SFTTrainer(args=config, train_dataset=datasets.Dataset.from_list(rows), **given)


if __name__ == "__main__":
    main()
