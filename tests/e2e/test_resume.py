"""A run that was killed and resumed ends with the bytes of a run that was not.

The run under test is this file as a script: ten trainer steps on fixed synthetic batches, a checkpoint every
two, "step N" printed before each step and "saving N" before each save. The test kills it with SIGKILL at such
a line, so at a moment that differs a little from run to run: no moment may matter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

STEPS, EVERY = 10, 2
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
MODELS = {
    "dense": {"model_type": "llama", **SHAPE},
    "moe": {
        "model_type": "qwen3_moe",
        **SHAPE,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}


def batch_of(step: int):
    """Batch number ``step``: a function of the step alone, as addressed randomness makes rollouts be."""
    from ostinato.algo.pack import Aggregation, aggregation_weights, pack
    from ostinato.types import Sample

    rng = np.random.default_rng((7, step))
    samples = []
    for group in range(3):
        prompt = rng.integers(0, 61, size=5)
        for sibling in range(3):
            tokens = np.concatenate([prompt, rng.integers(0, 61, size=4 + 3 * sibling)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            samples.append(
                Sample(
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
                    advantages=np.where(mask, rng.standard_normal(), 0.0).astype(np.float32),
                    versions=np.where(mask, step, -1).astype(np.int32),
                    group=group,
                    prompt_len=len(prompt),
                )
            )
    weights = aggregation_weights(samples, Aggregation.SAMPLE)
    return pack(samples, weights, tokens_per_microbatch=40, minibatches=2, version=step)


def trainer_of(model: str, full: bool):
    from ostinato.algo.algorithms import algorithm
    from ostinato.model.config import parse_config
    from ostinato.model.decoder import Decoder
    from ostinato.model.lora import AdapterSpec, init_adapters
    from ostinato.train.optimizer import OptimizerSettings, Schedule
    from ostinato.train.trainer import PolicyTrainer

    decoder = Decoder(parse_config(MODELS[model])).init_weights(seed=0).trainable(full)
    spec = AdapterSpec(rank=4, alpha=8, targets=("attn", "mlp") if model == "dense" else ("attn", "experts"))
    adapters = None if full else init_adapters(decoder.config, spec, seed=1)
    settings = OptimizerSettings(
        lr=1e-2, weight_decay=0.01, schedule=Schedule.COSINE, warmup_steps=2, total_steps=STEPS
    )
    grpo = algorithm("grpo", correction="token_truncate")
    return PolicyTrainer(decoder, adapters, grpo, optimizer=settings)


def run(folder: Path, model: str, full: bool) -> None:
    """Train to the end from the newest whole checkpoint; all that was trained goes to a file."""
    import torch
    from safetensors.torch import save_file

    from ostinato.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

    torch.set_num_threads(1)
    trainer = trainer_of(model, full)
    start = 0
    checkpoint = load_checkpoint(folder, identity=trainer.identity())
    if checkpoint is not None:
        trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
        start = checkpoint.step
    print("start", start, flush=True)
    for step in range(start, STEPS):
        print("step", step, flush=True)
        trainer.step(batch_of(step))
        if (step + 1) % EVERY == 0:
            print("saving", step + 1, flush=True)
            state = {"trainer": trainer.counters()}
            identity, tensors = trainer.identity(), trainer.tensors()
            save_checkpoint(
                folder, Checkpoint(step=step + 1, tensors=tensors, state=state, identity=identity), keep=2
            )
    save_file(trainer.tensors(), folder / "final.safetensors")


def start(folder: Path, model: str, full: bool) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), model, "full" if full else "lora"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)


def run_killed_at(folder: Path, model: str, full: bool, line: str, delay: float) -> None:
    process = start(folder, model, full)
    assert process.stdout is not None
    with process.stdout:
        for said in process.stdout:
            if said.strip() == line:
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait(timeout=400) == -signal.SIGKILL


def finish(process: subprocess.Popen[str], folder: Path) -> tuple[int, bytes]:
    """(the step the run started from, the bytes of parameters and optimizer at its end)."""
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0
    return int(said.split()[1]), (folder / "final.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("model", "full", "line", "delay"),
    [
        ("dense", True, "step 5", 0.0),
        ("moe", False, "saving 6", 0.003),
    ],
)
def test_killed_and_resumed_equals_never_killed(
    tmp_path: Path, model: str, full: bool, line: str, delay: float
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    beside = start(straight, model, full)
    run_killed_at(killed, model, full, line, delay)
    resumed_from, resumed = finish(start(killed, model, full), killed)
    assert resumed_from in (4, 6)
    assert (0, resumed) == finish(beside, straight)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    run(target, sys.argv[2], full=sys.argv[3] == "full")
