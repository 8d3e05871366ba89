"""How the seed model came to be: tokenizer, annotators, training from scratch, evaluation, checkpoint.

    python recipes/seed_moe.py --out ostinato/assets/seed-moe
    python recipes/seed_moe.py --size dense-0.5m --out dense-0.5m      # others of the ladder

Everything is drawn from one seed, so the same machine and thread count write the same weights. The
corpus imitates a small crowd of annotators who solve the same school problems: one works carefully,
one works in the same way but forgets carries and misremembers facts, one guesses without working. The
model learns all of them, as base models do; RL then has something to prefer (docs/seed-moe.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.env.arithmetic import Family, draw_prompts
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder, Moe
from ostinato.model.hf import load_model, save_model
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.render import Renderer
from ostinato.reward.verify import exact
from ostinato.train.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_norm,
    lr_factor,
    set_lr,
)
from ostinato.types import Completion, Microbatch, Prompt, Request, Sample, Sampling, Stop

# ---------------------------------------------------------------------------------------------
# The annotators
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotator:
    """How one member of the crowd answers; the three figures are probabilities."""

    share: float  # of the corpus
    guesses: float = 0.0  # no working, and a number that only resembles the answer
    forgets: float = 0.0  # at each carry, borrow and minus sign
    misremembers: float = 0.0  # at each fact: one too many or too few


CROWD = {
    "careful": Annotator(share=0.20),
    "careless": Annotator(share=0.40, forgets=0.5, misremembers=0.1),
    "guessing": Annotator(share=0.40, guesses=1.0),
}


@dataclass(frozen=True, slots=True)
class Mind:
    """An annotator at work: where the slips come from."""

    annotator: Annotator
    rng: random.Random

    def forgets(self) -> bool:
        return self.rng.random() < self.annotator.forgets

    def recall(self, value: int) -> int:
        slips = self.rng.random() < self.annotator.misremembers
        return abs(value + self.rng.choice((-1, 1))) if slips else value


def write_answer(prompt: Prompt, annotator: Annotator, rng: random.Random) -> str:
    """An answer in the annotator's manner: working, then "#### number" ("7+6=13 4+8+1=13 ... #### 933")."""
    if rng.random() < annotator.guesses:
        return f"#### {_near(int(prompt.columns['answer']), rng)}"
    working = WORKINGS[Family(prompt.columns["family"])]
    steps, answer = working(prompt.columns["expression"].split(), Mind(annotator, rng))
    return f"{' '.join(steps)} #### {answer}"


def _near(answer: int, rng: random.Random) -> int:
    """The answer with one digit replaced by another: what a guess without working looks like."""
    digits = list(str(answer))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([d for d in "0123456789" if d != digits[place]])
    return int("".join(digits))


def _sum(words: Sequence[str], mind: Mind) -> tuple[list[str], int]:
    """Columns from the right, the carry as the last term."""
    steps, value, carry, place = [], 0, 0, 1
    for x, y in _columns(words[0], words[2]):
        total = mind.recall(x + y + carry)
        steps.append(f"{x}+{y}" + (f"+{carry}" if carry else "") + f"={total}")
        value += total % 10 * place
        carry = 0 if total > 9 and mind.forgets() else total // 10
        place *= 10
    return steps, value + carry * place


def _difference(words: Sequence[str], mind: Mind) -> tuple[list[str], int]:
    """Columns from the right; a column that borrows writes its ten, and the next one subtracts 1 more."""
    steps, value, borrow, place = [], 0, 0, 1
    for x, y in _columns(words[0], words[2]):
        lent = x < y + borrow
        left = mind.recall(x + 10 * lent - y - borrow)
        steps.append(f"{x + 10 * lent}-{y}" + ("-1" if borrow else "") + f"={left}")
        value += left % 10 * place
        borrow = int(lent and not mind.forgets())
        place *= 10
    return steps, value


def _product(words: Sequence[str], mind: Mind) -> tuple[list[str], int]:
    """One digit times each digit from the right, plus the carry."""
    steps, value, carry, place = [], 0, 0, 1
    for y in map(int, reversed(words[2])):
        total = mind.recall(int(words[0]) * y + carry)
        steps.append(f"{words[0]}*{y}" + (f"+{carry}" if carry else "") + f"={total}")
        value += total % 10 * place
        carry = 0 if total > 9 and mind.forgets() else total // 10
        place *= 10
    return steps, value + carry * place


def _remainder(words: Sequence[str], mind: Mind) -> tuple[list[str], int]:
    """Long division from the left, remainders only; forgetting is to drop the remainder so far."""
    divisor = int(words[2])
    steps, left = [], int(words[0][0])
    for digit in map(int, words[0][1:]):
        value = 10 * left + digit
        left = mind.recall(value % divisor)
        steps.append(f"{value}%{divisor}={left}")
        if left and mind.forgets():
            left = 0
    return steps, left


def _chain(words: Sequence[str], mind: Mind) -> tuple[list[str], int]:
    """Term by term from the left; forgetting is to read a minus as a plus."""
    steps, total = [], int(words[0])
    for sign, term in zip(words[1::2], words[2::2], strict=True):
        sign = "+" if sign == "-" and (mind.forgets() or total < int(term)) else sign
        value = mind.recall(total + int(term) if sign == "+" else total - int(term))
        steps.append(f"{total}{sign}{term}={value}")
        total = value
    return steps, total


def _columns(a: str, b: str) -> Iterable[tuple[int, int]]:
    return ((int(x), int(y)) for x, y in zip_longest(reversed(a), reversed(b), fillvalue="0"))


Working = Callable[[Sequence[str], Mind], tuple[list[str], int]]  # (steps, answer) of an expression's words

WORKINGS: dict[Family, Working] = {
    Family.SUM: _sum,
    Family.DIFFERENCE: _difference,
    Family.PRODUCT: _product,
    Family.REMAINDER: _remainder,
    Family.CHAIN: _chain,
}


# ---------------------------------------------------------------------------------------------
# The folder: tokenizer, chat template, config
# ---------------------------------------------------------------------------------------------

END_OF_TEXT, START, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ARCHITECTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "mlp_only_layers": [0],  # one dense layer, so that every kind of adapter has a place
    "intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.01,
}

_EXPERTS = "mlp_only_layers num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"
_EXPERTS += " decoder_sparse_step router_aux_loss_coef"
# dense-2m: every layer is what layer 0 is, a control in lab/studies/2026-11-20-collapse
DENSE = {name: value for name, value in ARCHITECTURE.items() if name not in _EXPERTS.split()}
DENSE |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SMALL = {"hidden_size": 96, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 1}
LARGE = {"hidden_size": 320, "num_attention_heads": 10, "num_experts": 24, "moe_intermediate_size": 256}
MANY = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
SIZES: dict[str, Mapping[str, object]] = {  # the ladder of docs/compare.md; moe-6m is the asset
    "dense-0.5m": DENSE | SMALL,
    "dense-2m": DENSE,
    "moe-6m": ARCHITECTURE,
    "moe-19m": ARCHITECTURE | LARGE,
    "moe-64e": ARCHITECTURE | MANY,  # of lab/studies/2026-11-24-collapse-64
}


def write_folder(folder: Path, seed: int, architecture: Mapping[str, object] = ARCHITECTURE) -> None:
    """Tokenizer, chat template, generation defaults and config: everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(seed)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": ARCHITECTURE["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ids = {"eos_token_id": end, "pad_token_id": pad}
    sizes = {"vocab_size": tokenizer.get_vocab_size()}
    _write_json(folder / "config.json", {**architecture, **sizes, **ids})
    _write_json(folder / "generation_config.json", ids | {"do_sample": True, "temperature": 1.0})


def build_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE: any text can be written, digits stand alone, words of the problems are merged."""
    rng = random.Random(seed)
    texts = ["user\n", "assistant\n", "system\n"] * 100
    for prompt in draw_prompts("train", seed, 2000):
        texts += [message["content"] for message in prompt.messages or ()]
        texts.append(write_answer(prompt, CROWD["careful"], rng))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------
# The corpus
# ---------------------------------------------------------------------------------------------


def microbatches(
    renderer: Renderer, annotators: Sequence[Annotator], rng: random.Random, steps: int, batch_size: int
) -> Iterator[Microbatch]:
    """One packed microbatch per step, of fresh training problems answered by one annotator each."""
    for _ in range(steps):
        problems = draw_prompts("train", rng.getrandbits(63), batch_size)
        samples = [_sample(renderer, prompt, annotators, rng) for prompt in problems]
        weights = aggregation_weights(samples, Aggregation.TOKEN)
        yield pack(samples, weights, tokens_per_microbatch=1 << 20).microbatches[0]


def _sample(
    renderer: Renderer, prompt: Prompt, annotators: Sequence[Annotator], rng: random.Random
) -> Sample:
    annotator = rng.choices(annotators, [a.share for a in annotators])[0]
    context = renderer.prompt(prompt)
    answer = renderer.encode(write_answer(prompt, annotator, rng) + END)
    length = len(context) + len(answer)
    return Sample(
        tokens=np.concatenate([context, answer]),
        loss_mask=np.arange(length) >= len(context),
        logprobs=np.zeros(length, np.float32),
        advantages=np.ones(length, np.float32),
        versions=np.zeros(length, np.int32),
        group=0,
        prompt_len=len(context),
    )


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


class RouterProbe:
    """Ops that also remember the logits of every router: what a load-balancing loss needs, without a hook."""

    def __init__(self, decoder: Decoder) -> None:
        self.routers = {id(block.mlp.router) for block in decoder.blocks if isinstance(block.mlp, Moe)}
        self.logits: list[Tensor] = []

    def ops(self) -> Ops:
        def linear(x: Tensor, weight: Tensor, *args: object) -> Tensor:
            out = TORCH_OPS.linear(x, weight, *args)
            if id(weight) in self.routers:
                self.logits.append(out)
            return out

        return replace(TORCH_OPS, linear=linear)


def balance_loss(logits: Sequence[Tensor], routing: Tensor) -> Tensor:
    """E * sum_e (share of choices of e) * (mean probability of e), mean over layers; 1 when balanced.

    logits: per MoE layer [T, E]; routing: [T, L_moe, K]. Switch Transformer, arXiv 2101.03961 section 2.2.
    """
    losses = []
    for layer, logits_TE in enumerate(logits):
        num_experts = logits_TE.shape[1]
        chosen = routing[:, layer].flatten().long()
        load_E = torch.bincount(chosen, minlength=num_experts) / len(chosen)
        losses.append(num_experts * (load_E * logits_TE.softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


def losses(decoder: Decoder, micro: Microbatch) -> tuple[Tensor, Tensor]:
    """(cross-entropy per answer token, balance loss) of one microbatch; a dense model is always balanced."""
    probe = RouterProbe(decoder)
    hidden, routing = decoder(
        torch.from_numpy(micro.tokens),
        torch.from_numpy(micro.positions),
        PackedAttention(micro.segments),
        ops=probe.ops(),
    )
    logits = decoder.logits(hidden[torch.from_numpy(micro.rows)])
    cross_entropy = F.cross_entropy(logits, torch.from_numpy(micro.targets).long())
    if routing is None:
        return cross_entropy, torch.ones(())
    return cross_entropy, balance_loss(probe.logits, routing)


LOG_EVERY = 20  # steps


def train(
    decoder: Decoder,
    data: Iterable[Microbatch],
    settings: TrainerSection,
    log: Callable[[dict[str, object]], None],
    *,
    balance_coef: float = 0.02,
) -> None:
    """AdamW on all parameters, one microbatch per step; logs means over the last LOG_EVERY steps."""
    parameters = list(decoder.set_trainable(True).parameters())
    optimizer = build_optimizer(parameters, settings)
    started, tokens, recent = time.perf_counter(), 0, []
    for step, micro in enumerate(data, start=1):
        set_lr(optimizer, settings.lr * lr_factor(settings, step - 1))
        cross_entropy, balance = losses(decoder, micro)
        optimizer.zero_grad()
        (cross_entropy + balance_coef * balance).backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = gradient_norm(gradients).item()
        clip_gradients(gradients, norm, settings.max_grad_norm)
        optimizer.step()
        tokens += len(micro.tokens)
        recent.append((cross_entropy.item(), balance.item(), norm))
        if step % LOG_EVERY == 0:
            loss, mean_balance, mean_norm = np.mean(recent, axis=0).round(4).tolist()
            means = {"loss": loss, "balance": mean_balance, "grad_norm": mean_norm}
            log({"step": step, **means, "tokens": tokens, "seconds": round(time.perf_counter() - started, 1)})
            recent.clear()
    decoder.set_trainable(False)


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


def evaluate(folder: Path, seed: int, num_prompts: int = 256, samples: int = 16) -> dict[str, object]:
    """pass@1 and pass@``samples`` on held-out problems at temperature 1, with standard errors.

    ``working`` is the share of answers that show any, ``right_with_working`` how many of those are right.
    """
    renderer, decoder = Renderer(folder), load_model(folder, dtype=torch.bfloat16)
    prompts = draw_prompts("eval", seed, num_prompts)
    engine = LocalEngine(decoder, decode=renderer.decode, kv_memory_mb=256)
    sampling = Sampling(max_tokens=64, stop_tokens=(int(renderer.encode(END)[0]),))
    requests = [
        Request(tokens=renderer.prompt(prompt), sampling=sampling, seed=(seed, i, sample))
        for i, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    completions = asyncio.run(_complete(engine, requests))
    answers = [prompt.columns["answer"] for prompt in prompts for _ in range(samples)]
    right = np.array(exact([c.text for c in completions], answers)).reshape(num_prompts, samples)
    works = np.array(["=" in c.text for c in completions]).reshape(right.shape)
    families = np.array([prompt.columns["family"] for prompt in prompts])
    return {
        "split": "eval",
        "n": num_prompts,
        "samples": samples,
        **_mean("pass@1", right.mean(1)),
        **_mean(f"pass@{samples}", right.max(1)),
        "families": {str(f): round(float(right[families == f].mean()), 4) for f in Family},
        "tokens": round(float(np.mean([len(c.tokens) for c in completions])), 2),
        "working": round(float(works.mean()), 4),
        "right_with_working": round(float(right[works].mean()), 4),
        "truncated": sum(c.stop is Stop.LENGTH for c in completions),
    }


async def _complete(engine: LocalEngine, requests: Sequence[Request]) -> list[Completion]:
    found = {index: completion async for index, completion in engine.generate(requests)}
    return [found[index] for index in range(len(requests))]


def _mean(name: str, values: np.ndarray) -> dict[str, float]:
    """The mean over prompts, which are the independent draws, and its standard error."""
    error = values.std(ddof=1) / len(values) ** 0.5
    return {name: round(float(values.mean()), 4), f"{name}_stderr": round(float(error), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the seed model from scratch and evaluate it.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--textbook-steps", type=int, default=1400, help="steps on careful answers only")
    parser.add_argument("--crowd-steps", type=int, default=300, help="steps on answers of the whole crowd")
    parser.add_argument("--batch-size", type=int, default=48, help="conversations per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the balance loss")
    parser.add_argument("--size", choices=SIZES, default="moe-6m", help="of the ladder in docs/compare.md")
    parser.add_argument(
        "--threads", type=int, default=1, help="part of the arithmetic: another number, other weights"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    write_folder(args.out, args.seed, SIZES[args.size])
    with (args.out / "train_log.jsonl").open("w", encoding="utf-8", buffering=1) as file:

        def log(row: Mapping[str, object]) -> None:
            print(row, flush=True)
            file.write(json.dumps(row) + "\n")

        settings = {name: value for name, value in vars(args).items() if name != "out"}
        log(settings | {"crowd": {name: asdict(annotator) for name, annotator in CROWD.items()}})
        decoder = Decoder(read_config(args.out)).init_weights(args.seed)
        total_steps = args.textbook_steps + args.crowd_steps
        optimizer = TrainerSection(
            lr=args.lr,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            schedule="cosine",
            warmup_steps=total_steps // 20,
            steps=total_steps,
        )
        train(decoder, corpus(Renderer(args.out), args), optimizer, log, balance_coef=args.balance)
        save_model(in_bf16(decoder), args.out)
        log(evaluate(args.out, args.seed))


def corpus(renderer: Renderer, args: argparse.Namespace) -> Iterator[Microbatch]:
    """First the textbook, which teaches to calculate, then the crowd, which teaches how people answer."""
    lessons = {
        "textbook": ([CROWD["careful"]], args.textbook_steps),
        "crowd": (list(CROWD.values()), args.crowd_steps),
    }
    for lesson, (annotators, steps) in lessons.items():
        rng = random.Random(f"{lesson}/{args.seed}")
        yield from microbatches(renderer, annotators, rng, steps, args.batch_size)


def in_bf16(decoder: Decoder) -> Decoder:
    """The same weights rounded to bf16."""
    rounded = Decoder(decoder.config, dtype=torch.bfloat16)
    rounded.load_state_dict(decoder.state_dict())
    return rounded


if __name__ == "__main__":
    main()
