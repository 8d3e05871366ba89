"""A run of the packaged model that is over in seconds, by its overrides: for tests of its processes."""

from __future__ import annotations

STEPS = 5
SHORT: dict[str, object] = {
    "trainer.steps": STEPS,
    "trainer.checkpoint_every": 2,
    "trainer.warmup_steps": 0,
    "task.params.digits": 2,
    "task.n_train": 256,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "eval.every": 0,
    "eval.at_start": "false",
    "eval.n": 4,
    "model.dtype": "float32",
    "engine.threads": 1,
    "parallel.timeout_s": 60.0,
}
