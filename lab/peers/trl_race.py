"""TRL's GRPOTrainer as a contender of ``bench race``; run by the Python of TRL's own environment.

argv: JSON with folder (model), rows (a file: {"messages", "columns", "ids"} a line, in the order of
training), reward (a name of ostinato.reward.verify), paths (where that is found), group, prompts (of a step),
steps (of generations, each of minibatches optimizer steps), max_tokens, batch (per device), dtype, lr,
warmup, loss, scale, lora (arguments of LoraConfig), paged, seed, every (steps between two adapters), output,
check (such a file to be answered at the end, or empty).

Prints one JSON object: {"ready", "start", "ends" (Unix seconds of each step), "pauses" (pairs of
them, in which adapters are saved), "groups" (of each step, pairs of prompt length and lengths of answers),
"rewards" (means), "check" (the mean reward of TRL's own answers)}. Adapters are in output/step-N.
"""

from __future__ import annotations

import json
import os
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

    sys.path += task["paths"]  # behind its own
    from ostinato.reward.verify import resolve_function

    rate, rows = resolve_function(task["reward"]), read(task["rows"])
    found = {"start": 0.0, "ends": [], "pauses": [], "groups": [], "rewards": []}
    lengths = {text(row["messages"]): len(row["ids"]) for row in rows}

    def reward(prompts, completions, completion_ids, columns, **kwargs):
        values = judged(rate, completions, columns)
        sizes = [len(ids) for ids in completion_ids]
        firsts = range(0, len(sizes), task["group"])
        found["groups"].append(
            [[lengths[text(prompts[at])], sizes[at : at + task["group"]]] for at in firsts]
        )
        found["rewards"].append(sum(values) / len(values))
        return values

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs) -> None:
            found["start"] = time.time()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            step, within = divmod(state.global_step, task["minibatches"])
            if within:
                return
            found["ends"].append(time.time())
            if step % task["every"] == 0:
                kwargs["model"].save_pretrained(f"{task['output']}/step-{step}")
                found["pauses"].append([found["ends"][-1], time.time()])

    data = [{"prompt": row["messages"], "columns": json.dumps(row["columns"])} for row in rows]
    trainer = trl.GRPOTrainer(
        model=task["folder"], args=config(task), train_dataset=datasets.Dataset.from_list(data),
        reward_funcs=reward, peft_config=peft.LoraConfig(**task["lora"]), callbacks=[Clock()],
    )  # fmt: skip
    check_tokens(trainer.processing_class, rows[0])
    trainer.train()
    versions = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    found |= {"ready": versions, "check": own_score(trainer, task, rate) if task["check"] else None}
    answers.write(json.dumps(found) + "\n")


def config(task):
    import torch
    import trl

    autocast, generated = task["dtype"] == "autocast", task["prompts"] * task["group"] // task["batch"]
    return trl.GRPOConfig(
        output_dir=task["output"], use_cpu=True, bf16=autocast, gradient_checkpointing=False,
        per_device_train_batch_size=task["batch"], steps_per_generation=generated,
        gradient_accumulation_steps=generated // task["minibatches"], num_generations=task["group"],
        max_completion_length=task["max_tokens"], max_steps=task["steps"] * task["minibatches"],
        learning_rate=task["lr"], lr_scheduler_type="constant_with_warmup", warmup_steps=task["warmup"],
        weight_decay=0.0, max_grad_norm=1.0, loss_type=task["loss"], scale_rewards=task["scale"], beta=0.0,
        temperature=1.0, shuffle_dataset=False, seed=task["seed"], save_strategy="no", report_to="none",
        logging_steps=1, disable_tqdm=True, use_transformers_continuous_batching=task["paged"],
        model_init_kwargs={"dtype": torch.float32 if autocast else getattr(torch, task["dtype"])},
    )  # fmt: skip


def read(file):
    with open(file) as lines:
        return [json.loads(line) for line in lines]


def text(messages):
    return "\n".join(message["content"] for message in messages)


def judged(rate, completions, columns):
    """The rewards of chats whose columns are JSON."""
    each = [json.loads(text) for text in columns]
    return [
        float(value) for value in rate(completions, **{name: [one[name] for one in each] for name in each[0]})
    ]


def check_tokens(tokenizer, row):
    ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    if list(ids) != row["ids"]:
        raise ValueError(f"the prompt has other tokens here: {list(ids)}, not {row['ids']}")


def own_score(trainer, task, rate):
    """The mean reward of one answer at temperature 1 to each prompt, by TRL's own generation."""
    rows = read(task["check"])
    ids, _ = trainer._generate_single_turn([row["ids"] for row in rows], None, {}, 1)
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    values = judged(rate, chats, [json.dumps(row["columns"]) for row in rows])
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
