"""Rollout routing replay in TRL: a GRPOTrainer that trains on the experts it sampled with.

    pip install trl  &&  python recipes/trl_replay.py [--steps 4] [--no-replay]

Experts are recorded while ``transformers`` generates, and replayed in the old log-probabilities and in every
loss, backward included. With vLLM as the engine, ``Routes.from_vllm`` takes the place of the recording. The
overlap of native and replayed experts is logged; below 0.9 the run stops and says what is probably wrong.

Not done here: images, tools, several processes (routes are found by content, so that part would stay).
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

import ostinato
from ostinato.algo.routing import require_aligned
from ostinato.hf.replay import Routes, Tape, attach_replay

SEED_MOE = Path(ostinato.__file__).parent / "assets" / "seed-moe"


class ReplayGRPOTrainer(GRPOTrainer):
    """GRPO with R3 (arXiv 2510.11370). The routes of a generation are kept by the tokens they belong to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.beta != 0 or self.use_vllm:
            raise ValueError(
                f"beta is {self.beta} and use_vllm {self.use_vllm}; this example has no reference model and "
                "generates with transformers: use 0 and False"
            )
        self.replay = attach_replay(self.model)
        self.routes: dict[bytes, Routes] = {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        with self.replay.record() as tape:
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        rows = tape.native(batch=len(prompt_ids))
        length, width = (
            len(rows) // len(prompt_ids),
            max(map(len, prompt_ids)),
        )  # prompts are padded on the left
        self.routes = {}
        for i, (prompt, answer) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            begin = i * length + width - len(prompt)
            known = rows.rows(
                begin, begin + len(prompt) + len(answer) - 1
            )  # the last token was never an input
            self.routes[np.array([*prompt, *answer]).tobytes()] = known
        return completion_ids, logprobs

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kwargs.pop("batch_size", None)  # the rows of one forward are those of the whole batch
        texts = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        routes = Routes.padded(
            [self.routes[text.cpu().numpy().tobytes()] for text in texts], attention_mask.cpu()
        )
        tape = self.replay.set(routes)
        result = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        overlap = gate(tape, [len(text) for text in texts])
        self._metrics["train"]["replay/overlap"].append(float(overlap.mean()))
        if not torch.is_grad_enabled():  # old log-probabilities; of a loss, backward is still to come
            self.replay.clear()
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.replay.clear()
        return loss


def gate(tape: Tape, lengths: list[int]) -> np.ndarray:
    """The overlap of each sequence with what the trainer would have chosen; raises Misaligned below 0.9."""
    assert tape.routes is not None
    known = tape.routes.known
    ends = np.cumsum([length - 1 for length in lengths])[:-1]
    native, replayed = tape.native().dense()[known], tape.routes.dense()[known]
    return require_aligned(np.split(native, ends), np.split(replayed, ends))


def last_number(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 where the last number of the text is the answer."""
    numbers = [re.findall(r"-?\d+", messages[0]["content"]) for messages in completions]
    return [
        float(bool(found) and int(found[-1]) == right) for found, right in zip(numbers, answer, strict=True)
    ]


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(SEED_MOE))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-replay", action="store_true")
    args = parser.parse_args()
    pairs = np.random.default_rng(0).integers(10, 1000, (64, 2)).tolist()
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{a} + {b} = ?"}], "answer": a + b} for a, b in pairs]
    )
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        steps_per_generation=2,  # two minibatches from each generation, each
        num_iterations=2,  # used twice: the routes stay while the policy moves
        max_completion_length=64,
        learning_rate=1e-5,
        gradient_checkpointing=True,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    kind = GRPOTrainer if args.no_replay else ReplayGRPOTrainer
    trainer = kind(model=args.model, reward_funcs=last_number, args=settings, train_dataset=data)
    trainer.train()
    for entry in trainer.state.log_history:
        shown = ("step", "loss", "reward", "grad_norm", "replay/overlap", "step_time")
        print({key: round(entry[key], 5) for key in shown if key in entry})


if __name__ == "__main__":
    main()
