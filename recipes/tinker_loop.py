"""RL written by a client of the Tinker API: all of it but sampling and training, which a server does.

    ostinato tinker asset:seed-moe          prints TINKER_BASE_URL and TINKER_API_KEY; then, with these set,
    python recipes/tinker_loop.py --steps 20

GRPO on sums of two numbers: sample groups of answers, give advantages, train by importance sampling, publish.
The same file runs against any server of that API, for models that it has.
"""

from __future__ import annotations

import argparse
import random
import re
from typing import Any

import numpy as np
import tinker
from tinker import types


def problem(rng: random.Random) -> tuple[str, int]:
    """A question and its answer."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"What is {a} + {b}?", a + b


def prompt_of(tokenizer, question: str) -> list[int]:
    """Its tokens, by the model's own chat template."""
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def reward(text: str, answer: int) -> float:
    """1 where the last number is the answer."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """A row: position t predicts token t + 1, and nothing is learned from the prompt."""
    whole, before = prompt + answer.tokens, len(prompt) - 1
    zeros = np.zeros(before, np.float32)
    assert answer.logprobs is not None
    inputs: Any = {
        "target_tokens": np.array(whole[1:], np.int64),
        "logprobs": np.concatenate([zeros, np.array(answer.logprobs, np.float32)]),
        "advantages": np.concatenate([zeros, np.full(len(answer.tokens), advantage, np.float32)]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)


def step(client, tokenizer, rng: random.Random, options: argparse.Namespace, number: int) -> float:
    """One step of RL: the mean reward of its answers."""
    sampler = client.save_weights_and_get_sampling_client().result()
    problems = [problem(rng) for _ in range(options.groups)]
    prompts = [prompt_of(tokenizer, question) for question, _ in problems]
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(prompt),
            num_samples=options.group_size,
            sampling_params=types.SamplingParams(max_tokens=options.max_tokens, seed=1000 * number + index),
        )
        for index, prompt in enumerate(prompts)
    ]
    rows, scores = [], []
    for prompt, (_, answer), future in zip(prompts, problems, futures, strict=True):
        answers = future.result().sequences
        rewards = np.array([reward(tokenizer.decode(one.tokens), answer) for one in answers])
        scores.extend(rewards)
        if rewards.std() > 0:  # a group that agrees teaches nothing
            advantages = (rewards - rewards.mean()) / (rewards.std() * rewards.size * options.groups)
            rows += [datum(prompt, *pair) for pair in zip(answers, advantages.tolist(), strict=True)]
    if rows:
        trained = client.forward_backward(rows, "importance_sampling")
        stepped = client.optim_step(types.AdamParams(learning_rate=options.lr))
        trained.result()
        stepped.result()
    return float(np.mean(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="", help="of the server; its first one by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    with tinker.ServiceClient() as service:
        capabilities = tinker.RestClient().get_server_capabilities().result()
        model = options.model or capabilities.supported_models[0].model_name or ""
        client = service.create_lora_training_client(model, rank=16, seed=0).result()
        tokenizer, rng = client.get_tokenizer(), random.Random(0)
        for number in range(1, options.steps + 1):
            print(f"step {number:3} reward {step(client, tokenizer, rng, options, number):.3f}", flush=True)
        print("saved", client.save_weights_for_sampler("last").result().path)


if __name__ == "__main__":
    main()
