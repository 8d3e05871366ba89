"""The sections of a recipe, with every default. Docstrings and comments are what a user reads of a key."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from ostinato.config.fields import (
    Code,
    Count,
    Counts,
    File,
    Floats,
    ModelName,
    Names,
    PathKind,
    Positive,
    Program,
    Rewards,
    RowsName,
    Section,
    Share,
)
from ostinato.every import Axis, Every


class ModelSection(Section):
    """``path``: "asset:seed-moe", "smollm2-135m", a Hugging Face folder, or a hub name.

    ``storage`` of the base, which sampler and trainer share: "bfloat16" under float32 takes half the memory,
    "int8" (linear maps with a scale per output, other matrices in bfloat16; on a CPU) about a quarter.
    """

    path: ModelName = "asset:seed-moe"
    backend: Literal["auto", "native", "transformers"] = "auto"  # auto: our decoder, if it has the family
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: what is faster here, by measurement
    storage: Literal["same", "bfloat16", "int8"] = "same"  # of frozen matrices
    device: str = "auto"  # auto: cuda where there is one, else cpu
    fp32_head: bool = False  # logits in fp32, for the sampler and the trainer alike
    exact: bool = False  # log-probabilities of the trainer are the sampler's, bit for bit
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # e.g. {enable_thinking = false}

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f'model.device is {self.device!r}; use "auto", "cpu", "cuda" or "cuda:0"')
        return self


class AdapterSection(Section):
    """LoRA on the named linear maps, or full-parameter training."""

    kind: Literal["lora", "full"] = "lora"
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: Names = ("attn", "mlp", "shared", "experts")  # roles; "router" only when it is named
    expert_scheme: Literal["shared_outer", "per_expert"] = "shared_outer"
    expert_rank: Count = 0  # 0: the same as rank
    path: File = ""  # an adapter to begin with, as a run or export leaves it; its shape is then its own

    @model_validator(mode="after")
    def _check(self) -> AdapterSection:
        if self.path and self.kind == "full":
            raise ValueError(
                f'adapter.path is {self.path!r} with adapter.kind "full", which trains no adapter; '
                "drop one of them"
            )
        return self


class TeacherSection(Section):
    """Who scores what the policy samples, for ``algo.teacher_coef`` (1 in "opd"): an adapter on this run's
    model, another model with the same tokenizer, with an adapter of its own or none, or a server."""

    adapter: File = ""  # a run folder, or an adapter folder as a run or export leaves it
    model: ModelName = ""  # as model.path; empty: this run's model. With url: its name there, or the first
    url: str = ""  # "http://host:8000", a server that gives prompt_logprobs; its key: $OSTINATO_TEACHER_KEY


class MemorySection(Section):
    """How long the contexts of episodes with ``task.memory`` may be: beyond that older turns are shortened or
    left out, by what they matter, and a row begins anew with them (docs/memory.md)."""

    budget: Positive = 1024  # tokens of a context, before the answer
    recent: Count = 0  # of them the newest turns, verbatim; 0: a third


class RewardSection(Section):
    """``functions``: built-in names, "module:function" or "file.py:function", with TRL's signature; or
    "judge:NAME", by a model that compares answers (docs/judge.md). Their weighted sum is the reward
    (``algo.rewards = "apart"``: each is compared by itself).

    ``isolation``: no network, no files written but in a temporary folder ($TMPDIR), no secrets in the
    environment, no processes left behind (docs/security.md). "auto" does what the machine can and names what
    it cannot, "strict" refuses to begin then, "off" is for rewards that need the network, a GPU or files.
    """

    functions: Rewards = ("exact",)  # with task.env: ["env"]
    weights: Floats = ()  # empty: 1 each
    solved_at: float | Literal["full"] = "full"  # the reward of a solved answer; full: all positive weights
    timeout_s: Annotated[float, Field(gt=0)] = 10.0  # per group and function
    workers: Count = 0  # processes, each of one group at a time; 0: one, or 8 where a function is a coroutine
    isolation: Literal["auto", "off", "strict"] = "auto"
    judge_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # per group; others wait for the same engine

    @property
    def positive(self) -> dict[str, float]:
        """The positive weights by function."""
        weights = self.weights or (1.0,) * len(self.functions)
        return {name: weight for name, weight in zip(self.functions, weights, strict=True) if weight > 0}

    @property
    def by_name(self) -> dict[str, float]:
        """The weights by the names that functions have in metrics: as short as they are different."""
        short = [
            "judge" if function.startswith("judge:") else function.rpartition(":")[2]
            for function in self.functions
        ]
        names = short if len(set(short)) == len(short) else self.functions
        return dict(zip(names, self.weights or (1.0,) * len(self.functions), strict=True))

    @property
    def full_marks(self) -> float:
        """A 1 from every function with a positive weight."""
        return sum(self.positive.values())

    @model_validator(mode="after")
    def _check(self) -> RewardSection:
        if not self.functions:
            raise ValueError('reward.functions is empty; name at least one, e.g. ["exact"]')
        if len(set(self.functions)) != len(self.functions):
            raise ValueError(
                f"reward.functions is {list(self.functions)}, which names one twice; weigh it instead"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for {len(self.functions)} reward.functions; "
                "give one weight per function, or leave weights out"
            )
        if "code_tests" in self.functions and self.isolation == "off":
            raise ValueError(
                'reward.isolation is "off" with the reward code_tests, which runs code of the policy; '
                'use "auto" or "strict"'
            )
        return self


class RolloutSection(Section):
    """What a step samples: ``prompts_per_step`` groups of ``group_size`` completions.

    With ``interrupt_after = [lo, hi]`` an answer has a thinking budget, uniform in lo to hi tokens. One that
    has neither ended nor closed its thought (with ``think_end``) is then made to answer: the phrase is put
    in, and ``answer_tokens`` follow at most. The longest answer is hi + the phrase + ``answer_tokens``, and
    ``max_tokens`` is not used (ScaleRL, arXiv 2510.13786, A.10). Evaluation interrupts alike.
    """

    prompts_per_step: Positive = 16
    group_size: Positive = 16
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: Count = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    max_tokens: Positive = 64  # per turn
    stop: Names = ()  # strings that end an answer, beside the model's own stop tokens
    interrupt_after: Counts = ()  # [lo, hi] tokens of thinking; empty: never
    answer_tokens: Count = 0  # after the thinking budget
    interrupt_phrase: str = (
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    )
    think_end: str = "</think>"  # "": an answer that has not ended is still thinking
    solved_for_good: Share = 0.0  # a prompt that this share of its group solves never comes again; 0: off

    @model_validator(mode="after")
    def _check(self) -> RolloutSection:
        if "" in self.stop:
            raise ValueError("rollout.stop has an empty string, which ends every answer; remove it")
        self._check_interruption()
        if self.solved_for_good and self.group_size < 2:
            raise ValueError(
                f"rollout.solved_for_good is {self.solved_for_good} with rollout.group_size 1, and one "
                "answer is no pass rate; use a group_size of at least 2, or solved_for_good = 0"
            )
        return self

    def _check_interruption(self) -> None:
        after, answer = list(self.interrupt_after), self.answer_tokens
        if not after:
            if answer:
                raise ValueError(
                    f"rollout.answer_tokens is {answer} without rollout.interrupt_after, so nothing would "
                    "use it; name a thinking budget, e.g. interrupt_after = [48, 64], or leave it at 0"
                )
            return
        if len(after) != 2 or not 1 <= after[0] <= after[1]:
            raise ValueError(
                f"rollout.interrupt_after is {after}; give [lo, hi] tokens of thinking with 1 <= lo <= hi"
            )
        if answer < 1:
            raise ValueError(
                f"rollout.answer_tokens is {answer} with rollout.interrupt_after = {after}, which leaves an "
                "interrupted answer no room; use at least 1"
            )
        if not self.interrupt_phrase:
            raise ValueError(
                'rollout.interrupt_phrase is "" with rollout.interrupt_after, so nothing would tell the '
                "policy to answer; give it a phrase"
            )
        if clash := [string for string in self.stop if string in self.interrupt_phrase]:
            raise ValueError(
                f"rollout.interrupt_phrase holds {clash[0]!r}, one of rollout.stop, which ends an answer; "
                "change one of them"
            )


class PipelineSection(Section):
    """How sampling and training overlap.

    ``staleness`` k: no token that is trained on is of a policy more than k steps old. Without ``overlap`` the
    samplers play k rounds ahead in lockstep: reproducible, and no faster. With it they go on while the
    trainer learns, and take up its weights in flight (PipelineRL, arXiv 2509.19128); 0 is then the
    synchronous loop, bit for bit.
    """

    staleness: Count = 0  # steps
    overlap: bool = False
    placement: Literal["least-loaded", "longest-first", "histopipe"] = "least-loaded"
    watch_s: Annotated[float, Field(gt=0)] = 600.0  # without any progress, before the run ends and says where


class ClusterSection(Section):
    """Workers as Ray actors; with no samplers here everything runs in one process and needs no Ray."""

    samplers: Count = 0  # 0: in this process
    graders: Count = 0  # actors that call the rewards; 0: children of this process
    remote_trainer: bool = False  # the trainer as an actor too
    address: str = ""  # of a running Ray ("auto", "host:6379"); empty: one is started on this machine
    cpus_per_worker: Positive = 1
    gpus_per_sampler: Annotated[float, Field(ge=0)] = 0.0
    gpus_per_trainer: Annotated[float, Field(ge=0)] = 0.0
    start_s: Annotated[float, Field(gt=0)] = 300.0  # for a worker to be ready
    silence_s: Annotated[float, Field(gt=0)] = 60.0  # without a sign of life, before a worker is replaced

    @model_validator(mode="after")
    def _check(self) -> ClusterSection:
        if not self.samplers and (self.graders or self.remote_trainer or self.address):
            key = "graders" if self.graders else "remote_trainer" if self.remote_trainer else "address"
            raise ValueError(
                f"cluster.{key} is {getattr(self, key)!r} with cluster.samplers 0, which runs everything in "
                "one process; set cluster.samplers to 1 or more"
            )
        return self


class ParallelSection(Section):
    """The trainer over several ranks: ``layout`` says how ("d2t2": two data ranks of two tensor ranks each,
    see docs/parallel.md); torchrun starts them on any number of hosts, else the run starts them on this one.
    """

    layout: str = ""  # empty: one rank, this process
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl where the model is on GPUs
    timeout_s: Annotated[float, Field(gt=0)] = 300.0  # of one collective
    placement: File = ""  # a file that says which expert rank keeps which experts (ostinato place)

    @property
    def sharded(self) -> bool:
        return self.layout not in ("", "1")


class AlgoSection(Section):
    """An algorithm by name; any other key overrides one of its vetted defaults and is visibly the user's."""

    model_config = ConfigDict(extra="allow")
    name: str = "grpo"
    loss: Code = ""  # clipped, sequence_clipped, cispo, reinforce or "file.py:function"; "": the name's

    @property
    def overrides(self) -> dict[str, Any]:
        return {**({"loss": self.loss} if self.loss else {}), **(self.model_extra or {})}


class TrainerSection(Section):
    """AdamW and its schedule; ``steps`` are rollout batches, each of ``minibatches`` optimizer steps."""

    steps: Positive = 100  # of the run in all, also where it is resumed
    budget: Count | str = 0  # of training compute, as eval.every; the step that spends it is the last
    until: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the budget at which it stops for now
    lr: Annotated[float, Field(gt=0)] = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: Floats = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0  # inf: off
    minibatches: Positive = 1
    tokens_per_microbatch: Positive = 4096
    replay: bool | Literal["shuffled"] = True  # the sampler's experts; "shuffled": a control
    replay_threshold: Share = 0.9  # ids that a sequence's routes must share with the trainer's; 0: no gate
    recompute: bool = False  # trade a second forward for the activations' memory
    checkpoint_every: Count = 50  # 0: only at the end and on SIGTERM
    keep_checkpoints: Positive = 2
    stop_on_collapse: bool = False  # end the run when the stability watch says that it has collapsed
    stop_on_forgetting: bool = False  # end it when the forgetting watch raises an alarm

    @model_validator(mode="after")
    def _check(self) -> TrainerSection:
        Every.parse(self.budget, "trainer.budget")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"trainer.betas is {list(self.betas)}; give two numbers in [0, 1), e.g. [0.9, 0.999]"
            )
        if self.schedule != "constant" and self.warmup_steps >= self.steps:
            raise ValueError(
                f"trainer.warmup_steps is {self.warmup_steps} of {self.steps} trainer.steps, which leaves "
                f"nothing for the {self.schedule} schedule; lower it"
            )
        usual = type(self).model_fields["replay_threshold"].default
        if self.replay in (False, "shuffled") and self.replay_threshold != usual:
            raise ValueError(
                f"trainer.replay_threshold is {self.replay_threshold} with trainer.replay {self.replay}, "
                f"which has no gate; leave it at {usual}, or set replay to true"
            )
        return self


class DownstreamSection(Section):
    """A further set of prompts to be scored on, of a source of its own (see ``TaskSection``)."""

    source: RowsName
    params: dict[str, Any] = Field(default_factory=dict)  # of the source
    split: Literal["eval", "train"] = "eval"
    n: Count = 0  # 0: every row of a file
    k: Positive = 1
    every: Count | str = 0  # as eval.every
    task: str = ""  # of a mixture: whose environment, tools and rewards it has; empty: the first one's


class EvalSection(Section):
    """Held-out score: ``k`` samples for each of ``n`` prompts, with the same noise every time; before and
    after training also one greedy answer to each.

    ``every``: steps, or training compute as "2e14 flops", "1e6 tokens", "0.5 hours", "0.5 device-hours".
    """

    every: Count | str = 20  # 0: only before and after
    shares: Floats = ()  # of trainer.budget, at which it is scored beside that
    keep_weights: bool = False  # those of every score, in scored/ of the run: adapters as PEFT has them
    n: Positive = 256
    k: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0  # 0: greedy
    at_start: bool = True
    start_factor: Positive = 1  # so many times k samples before training: every forecast leans on that score
    split: Literal["eval", "train"] = "eval"
    downstream: dict[str, DownstreamSection] = Field(default_factory=dict)  # by name

    @model_validator(mode="after")
    def _check(self) -> EvalSection:
        Every.parse(self.every, "eval.every")
        samples = {"k": self.k, "start_factor": self.start_factor}
        samples |= {f"downstream.{name}.k": each.k for name, each in self.downstream.items()}
        for field, count in samples.items():
            if self.temperature == 0 and count > 1:
                raise ValueError(
                    f"eval.{field} is {count} with eval.temperature 0, which draws {count} equal answers; "
                    f"set eval.{field}=1 or a positive temperature"
                )
        for name, each in self.downstream.items():
            if name in ("eval", "greedy"):
                of = "the main set" if name == "eval" else "greedy answers to the main set"
                raise ValueError(f"eval.downstream.{name} has the name of {of}; give it another")
            Every.parse(each.every, f"eval.downstream.{name}.every")
        return self


class ForecastSection(Section):
    """After each evaluation: where the run will end, and whether the rest of it is worth its compute."""

    enabled: bool = True
    axis: Annotated[Axis, Field(strict=False)] = Axis.FLOPS
    budget: Annotated[float, Field(ge=0)] = 0.0  # of steps alone; 0: trainer.steps at their mean cost so far
    min_gain: Annotated[float, Field(gt=0, le=1)] = 0.005  # the least gain that the rest has to bring
    stop: bool = False  # end the run when it surely (90 %) brings less

    @model_validator(mode="after")
    def _check(self) -> ForecastSection:
        if self.stop and not self.enabled:
            raise ValueError(
                "forecast.stop is true with forecast.enabled false, so nothing would stop the run; "
                "drop one of them"
            )
        return self


class ForgettingSection(Section):
    """The forgetting watch: what the policy could do before training and is not trained on, kept then and
    looked at while it trains (docs/forgetting.md)."""

    enabled: bool = True
    source: RowsName = ""  # of the questions, as task.source; empty: what the task leaves out, or plain ones
    params: dict[str, Any] = Field(default_factory=dict)  # of the source
    share: Annotated[float, Field(gt=0, le=1)] = (
        0.02  # of the run's FLOPs that it may cost; decides how often
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.03  # share of the ability whose loss is no alarm


class EngineSection(Section):
    """The sampler: its KV pool and batch; ``threads`` is "auto" (measured once per machine) or a number.

    ``weights``: "model" shares the trainer's own; the others are a copy of the base beside it, in which the
    sampler computes in bfloat16, with linear maps of 8 bits for "int8" and "fp8". Adapters come on top.
    """

    backend: Literal["local", "vllm"] = "local"
    address: str = ""  # of a running vLLM server, "http://host:8000"; empty: the run starts one
    python: Program = ""  # interpreter of the environment that has vLLM; empty: this one
    server_args: Names = ()  # further arguments of the vLLM server
    weights: Literal["model", "bf16", "int8", "fp8"] = "model"
    kv_memory_mb: Positive | Literal["auto"] = "auto"  # auto: what the batch needs, as far as there is memory
    max_batch: Positive = 256  # sequences decoded together
    native: bool = True  # kernels in C++ where a compiler is found, in Triton on a GPU
    threads: Positive | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> EngineSection:
        of_vllm = {"address": self.address, "python": self.python, "server_args": list(self.server_args)}
        given = [name for name, value in of_vllm.items() if value]
        if given and self.backend != "vllm":
            raise ValueError(
                f'engine.{given[0]} is {of_vllm[given[0]]!r} with engine.backend "{self.backend}", which has '
                'no server; set engine.backend to "vllm", or drop it'
            )
        if self.address and len(given) > 1:
            raise ValueError(
                f"engine.{given[1]} is {of_vllm[given[1]]!r} with engine.address {self.address!r}, where "
                "the server is started elsewhere; drop one of them"
            )
        return self


class DraftSection(Section):
    """Guesses from what was sampled before, verified by the engine: the same tokens in fewer passes."""

    enabled: bool = True


class LedgerSection(Section):
    """What the run is on, and what that costs: hours x ``devices`` are device hours, idle ones too."""

    devices: Positive = 1  # this machine, or its GPUs
    price_per_device_hour: Annotated[float, Field(ge=0)] = 0.0  # 0: not known
    currency: str = "USD"


class LogSection(Section):
    """``dir`` holds the run folders; JSONL is always written, ``writers`` come on top."""

    dir: str = "runs"
    writers: Annotated[tuple[Literal["tensorboard", "trackio", "wandb"], ...], Field(strict=False)] = ()
    trajectories_every: Count = 10  # steps, beside the first and the last; 0: never
    mismatch_every: Count = 25  # steps between measurements of sampler against trainer; 0: never


class AblateSection(Section):
    """What ``ostinato ablate --leave-one-out`` compares the recipe with: name = the overrides of an arm."""

    arms: Annotated[dict[str, Names], PathKind.OVERRIDE] = Field(
        default_factory=dict
    )  # e.g. "no fp32 head" = ["model.fp32_head=false"]


class SftSection(Section):
    """``ostinato sft``: training on answers that the rows of ``task.source`` have (docs/guide/sft.md), with
    ``trainer`` and ``adapter`` as they are; ``eval.every`` (steps) and ``eval.n`` for the held-out loss."""

    loss: Literal["off", "tokens", "dpo"] = "off"  # of assistant tokens; or of rows with chosen and rejected
    turns: Literal["last", "all"] = "last"  # of the assistant that are trained, for "tokens"
    rows_per_step: Positive = 32
    epochs: Count = 0  # passes over the rows, in place of trainer.steps; 0: trainer.steps
    beta: Annotated[float, Field(gt=0)] = 0.1  # of "dpo"
