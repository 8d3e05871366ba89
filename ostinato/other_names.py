"""What other trainers (TRL, PEFT, verl, transformers) call the keys of a recipe. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping

# name: the key of a recipe, or what stands in its place
OTHER_NAMES: Mapping[str, str] = {
    "actor_rollout_ref": "model, adapter, rollout and trainer",
    "adam_beta1": "the first of trainer.betas",
    "adam_beta2": "the second of trainer.betas",
    "adam_epsilon": "trainer.eps",
    "adv_estimator": "algo.name",
    "beta": "algo.kl_coef (of DPO: sft.beta)",
    "bf16": 'model.dtype = "bfloat16"',
    "clip_ratio": "algo.clip_low and algo.clip_high",
    "clip_ratio_high": "algo.clip_high",
    "clip_ratio_low": "algo.clip_low",
    "dataset": "task.source",
    "dataset_name": "task.source",
    "entropy_coeff": "algo.entropy_coef",
    "epsilon": "algo.clip_low and algo.clip_high",
    "epsilon_high": "algo.clip_high",
    "epsilon_low": "algo.clip_low",
    "eval_steps": "eval.every",
    "gradient_accumulation_steps": "trainer.tokens_per_microbatch, by which a step is cut",
    "gradient_checkpointing": "trainer.recompute",
    "group_size": "rollout.group_size",
    "importance_sampling_level": 'algo.name = "gspo" or "grpo"',
    "kl_loss_coef": "algo.kl_coef",
    "learning_rate": "trainer.lr",
    "lora_alpha": "adapter.alpha",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_target_modules": "adapter.targets",
    "loss_type": "algo.name, or algo.loss and algo.aggregation",
    "lr_scheduler_type": "trainer.schedule",
    "mask_truncated_completions": "algo.mask_truncated",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_steps": "trainer.steps",
    "model.name": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_iterations": "trainer.minibatches, of which each learns from answers of its own",
    "num_train_epochs": "trainer.steps (sft.epochs for ostinato sft)",
    "output_dir": "log.dir",
    "per_device_train_batch_size": "rollout.prompts_per_step (sft.rows_per_step for ostinato sft)",
    "ppo_epochs": "trainer.minibatches, of which each learns from answers of its own",
    "ppo_mini_batch_size": "rollout.prompts_per_step / trainer.minibatches",
    "pretrained_model_name_or_path": "model.path",
    "r": "adapter.rank",
    "report_to": "log.writers",
    "response_length": "rollout.max_tokens",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "rollout.n": "rollout.group_size",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "scale_rewards": "algo.scale",
    "target_modules": "adapter.targets",
    "tensor_model_parallel_size": "parallel.layout",
    "torch_dtype": "model.dtype",
    "total_epochs": "trainer.steps (sft.epochs for ostinato sft)",
    "total_training_steps": "trainer.steps",
    "train_batch_size": "rollout.prompts_per_step",
    "train_files": "task.source",
    "use_peft": "adapter.kind",
    "use_vllm": 'engine.backend = "vllm"',
    "warmup_ratio": "trainer.warmup_steps",
}


def key_hint(key: str) -> str:
    """What a key of another trainer is here, in words; "" for a key that is in none of them. ``key`` may have
    its section in front."""
    name = key if key in OTHER_NAMES else key.rpartition(".")[2]
    return f"{name} of other trainers is {OTHER_NAMES[name]} here" if name in OTHER_NAMES else ""
