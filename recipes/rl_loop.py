"""All of RL in one file: the loop of Ostinato without its conveniences. Run it: python recipes/rl_loop.py

    prompt -> G completions -> rewards -> advantages -> samples -> packed batch -> optimizer step -> publish

With the packaged seed-moe it learns arithmetic; without, a tiny random mixture-of-experts learns to say even
numbers, in seconds. What `ostinato train` adds around this: rewards in killable processes, evaluation,
checkpoints, resume, health of the signal, books of time, tokens and FLOPs (ostinato/pipeline).
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ostinato
from ostinato.algo.advantages import advantages
from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.algo.pack import aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.env.arithmetic import draw_prompts
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec
from ostinato.render import Renderer
from ostinato.rollout.convert import make_samples
from ostinato.rollout.health import compute_health
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Group, Prompt, Request, Reward, Sample, Sampling, Trajectory, Turn

SEED_MOE = Path(ostinato.__file__).parent / "assets" / "seed-moe"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A base model and something for it to do."""

    decoder: Decoder
    prompt: Callable[[int], Prompt]  # the stream of prompts
    tokens: Callable[[Prompt], np.ndarray]  # what the model sees of one
    reward: Callable[[Prompt, Completion], float]
    sampling: Sampling
    lr: float
    decode: Callable[..., str] | None = None


def arithmetic(folder: Path) -> Task:
    """School arithmetic for a language model: the last number of the answer must be right."""
    renderer = Renderer(folder)
    prompts = draw_prompts("train", seed=0, n=2048)

    def reward(prompt: Prompt, completion: Completion) -> float:
        numbers = re.findall(r"-?\d+", completion.text)
        return float(bool(numbers) and numbers[-1] == prompt.columns["answer"])

    return Task(
        decoder=load_model(folder),
        prompt=lambda index: prompts[index % len(prompts)],
        tokens=renderer.prompt,
        reward=reward,
        sampling=Sampling(max_tokens=64, stop_tokens=renderer.stop_tokens),
        lr=2e-3,
        decode=renderer.decode,
    )


def even_numbers() -> Task:
    """For a random model of 64 tokens, the reward is the share of even tokens in its answer."""
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "initializer_range": 0.3,
    }
    return Task(
        decoder=Decoder(parse_config(config)).init_weights(seed=0),
        prompt=lambda index: Prompt(uid=str(index), text=str(index)),
        tokens=lambda prompt: np.array([1, 2, 3 + int(prompt.text or 0) % 61], np.int32),
        reward=lambda prompt, completion: float((completion.tokens % 2 == 0).mean()),
        sampling=Sampling(max_tokens=8),
        lr=2e-2,
    )


async def rollout(task: Task, engine: LocalEngine, prompt: Prompt, size: int, seed: tuple[int, ...]) -> Group:
    """The siblings of one prompt, sampled in one call: their prompt is computed once.

    The seed addresses the noise: (run, step, prompt, sample). No batch, order or restart changes a token.
    """
    context = task.tokens(prompt)
    requests = [Request(tokens=context, sampling=task.sampling, seed=(*seed, k)) for k in range(size)]
    played: dict[int, Trajectory] = {}
    async for k, completion in engine.generate(requests):
        played[k] = Trajectory(
            turns=(Turn(context=context, completion=completion),),
            stop=completion.stop,
            seed=requests[k].seed,
            reward=Reward(value=task.reward(prompt, completion)),
        )
    return Group(prompt=prompt, trajectories=tuple(played[k] for k in range(size)), step=seed[1])


def credit(
    groups: list[Group], algorithm: Algorithm, max_tokens: int
) -> tuple[list[Sample], list[np.ndarray]]:
    """Samples with an advantage on every sampled token, and the weight of every token in the loss.

    The trainer sees none of this: its loss is a weighted sum over tokens, whoever wrote the advantages.
    """
    values = advantages(
        [np.array([t.reward.value for t in group.trajectories if t.reward], np.float64) for group in groups],
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        batch_pool=algorithm.batch_pool,
        drop_zero_variance=algorithm.drop_zero_variance,
    )
    made = [sample for i, group in enumerate(groups) for sample in make_samples(group, i, values[i])]
    return made, aggregation_weights(made, algorithm.aggregation, max_tokens=max_tokens)


async def train(
    task: Task, *, steps: int, prompts: int, group_size: int, algorithm: Algorithm, seed: int = 0
) -> list[Mapping[str, float]]:
    """The loop. Returns the metrics of every step."""
    adapters = init_adapters(task.decoder.config, AdapterSpec(rank=8, alpha=16), seed)
    trainer = PolicyTrainer(task.decoder, adapters, algorithm, settings=TrainerSection(lr=task.lr))
    engine = LocalEngine(task.decoder, decode=task.decode, kv_memory_mb=64)  # the same base tensors
    engine.publish(trainer.adapters(), version=0)
    version, history = 0, []
    for step in range(1, steps + 1):
        started = time.perf_counter()
        indices = range((step - 1) * prompts, step * prompts)
        # all prompts at once: the engine batches all of its requests
        groups = await asyncio.gather(
            *(rollout(task, engine, task.prompt(i), group_size, (seed, step, i)) for i in indices)
        )
        made, weights = credit(groups, algorithm, task.sampling.max_tokens)
        metrics = compute_health(groups)
        if made:  # nothing is left when every group was dropped for want of variance
            batch = pack(made, weights, tokens_per_microbatch=4096, version=version)
            metrics |= trainer.step(batch).metrics
            version += 1
            engine.publish(trainer.adapters(), version)
        metrics["step_time"] = time.perf_counter() - started
        history.append(metrics)
        print(
            f"step {step:3d}  reward {metrics['reward']:.3f}  "
            f"tokens {metrics['completions/mean_length']:.1f}  "
            f"no variance {metrics['frac_reward_zero_std']:.2f}  "
            f"{metrics['step_time']:.2f} s"
        )
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description="RL in one file")
    parser.add_argument("--model", type=Path, default=SEED_MOE, help="a Hugging Face folder")
    parser.add_argument("--tiny", action="store_true", help="the random model, which needs no folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--algorithm", default="grpo")
    arguments = parser.parse_args()
    has_model = (arguments.model / "config.json").is_file() and not arguments.tiny
    asyncio.run(
        train(
            arithmetic(arguments.model) if has_model else even_numbers(),
            steps=arguments.steps,
            prompts=arguments.prompts,
            group_size=arguments.group_size,
            algorithm=algorithm(arguments.algorithm),
        )
    )


if __name__ == "__main__":
    main()
