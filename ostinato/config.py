"""A recipe: one TOML file, a frozen tree of plain values, dotted overrides from the command line.

Each value exists once, with its default here; nothing is written back after loading. What a user wrote
wrongly raises ``ValueError`` with one sentence that names the field, the value and the mend. Only what
needs no model is checked here; ``cli.build.check`` checks the rest (algorithm keys, context length).

>>> recipe = Recipe.load("recipes/quickstart.toml", "trainer.steps=10", "algo.name=dapo")
"""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ostinato.axis import Axis
from ostinato.every import Every
from ostinato.toml import dumps

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has arrays, not tuples
Floats = Annotated[tuple[float, ...], Field(strict=False)]
Counts = Annotated[tuple[int, ...], Field(strict=False)]


class Section(BaseModel):
    """Frozen, typed without coercion (no "3" for 3), and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """``path``: "asset:seed-moe", "smollm2-135m", a Hugging Face folder, or a hub name."""

    path: str = "asset:seed-moe"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"  # auto: cuda where there is one, else cpu
    fp32_head: bool = False  # logits in fp32, for the sampler and the trainer alike


class AdapterSection(Section):
    """LoRA on the named linear maps, or full-parameter training."""

    kind: Literal["lora", "full"] = "lora"
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: Names = ("attn", "mlp", "shared", "experts")  # roles; "router" only when it is named
    expert_scheme: Literal["shared_outer", "per_expert"] = "shared_outer"
    expert_rank: Count = 0  # 0: the same as rank
    path: str = ""  # an adapter to begin with, as a run or export leaves it; its shape is then its own

    @model_validator(mode="after")
    def _check(self) -> AdapterSection:
        if self.path and self.kind == "full":
            raise ValueError(
                f'adapter.path is {self.path!r} with adapter.kind "full", which trains no adapter; '
                "drop one of them"
            )
        return self


class TaskSection(Section):
    """``source``: "arithmetic", "gym:<name>", a .jsonl or .parquet file, a dataset folder, or "hf:<name>"."""

    source: str = "arithmetic"
    n_train: Count = 4096  # 0: every row of a file
    seed: int = 0
    params: dict[str, Any] = Field(default_factory=dict)  # of the source
    system_prompt: str = ""
    max_turns: Positive = 1
    tools: Names = ()  # built-in names, "module:function" or "file.py:function"


class RewardSection(Section):
    """``functions``: built-in names, "module:function" or "file.py:function", with TRL's signature."""

    functions: Names = ("exact",)
    weights: Floats = ()  # empty: 1 each
    solved_at: float | Literal["full"] = "full"  # the reward of a solved answer; full: all positive weights
    timeout_s: Annotated[float, Field(gt=0)] = 10.0  # per group and function
    workers: Positive = 1

    @model_validator(mode="after")
    def _check(self) -> RewardSection:
        if not self.functions:
            raise ValueError('reward.functions is empty; name at least one, e.g. ["exact"]')
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for {len(self.functions)} reward.functions; "
                "give one weight per function, or leave weights out"
            )
        return self


class RolloutSection(Section):
    """What a step samples: ``prompts_per_step`` groups of ``group_size`` completions.

    With ``interrupt_after = [lo, hi]`` an answer has a thinking budget, uniform in lo to hi tokens. One that
    has neither ended nor closed its thought (with ``think_end``) is then told to answer: the phrase is put
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
        if said := [string for string in self.stop if string in self.interrupt_phrase]:
            raise ValueError(
                f"rollout.interrupt_phrase holds {said[0]!r}, one of rollout.stop, which ends an answer; "
                "change one of them"
            )


class PipelineSection(Section):
    """How old a batch is when it is trained on: ``staleness`` k plays k steps ahead, in lockstep. It saves no
    time in one process; it is there to see what asynchrony would cost."""

    staleness: Count = 0  # steps between the policy that samples a batch and the one that trains on it


class AlgoSection(Section):
    """An algorithm by name; any other key overrides one of its vetted defaults and is visibly the user's."""

    model_config = ConfigDict(extra="allow")
    name: str = "grpo"

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainerSection(Section):
    """AdamW and its schedule; ``steps`` are rollout batches, each of ``minibatches`` optimizer steps."""

    steps: Positive = 100
    lr: Annotated[float, Field(gt=0)] = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: Floats = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0  # inf: off
    minibatches: Positive = 1
    tokens_per_microbatch: Positive = 4096
    replay: bool | Literal["auto"] = True  # train MoE layers on the sampler's experts; auto: if it is needed
    replay_threshold: Share = 0.9  # ids that a sequence's routes must share with the trainer's; 0: no gate
    recompute: bool = False  # trade a second forward for the activations' memory
    checkpoint_every: Count = 50  # 0: only at the end and on SIGTERM
    keep_checkpoints: Positive = 2
    max_refused_in_a_row: Positive = 5
    stop_on_collapse: bool = False  # end the run when the stability watch says that it has collapsed

    @model_validator(mode="after")
    def _check(self) -> TrainerSection:
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
        if self.replay is False and self.replay_threshold != usual:
            raise ValueError(
                f"trainer.replay_threshold is {self.replay_threshold} with trainer.replay false, which has "
                f"no gate; leave it at {usual}, or set replay to true"
            )
        return self


class DownstreamSection(Section):
    """A further set of prompts to be scored on, of a source of its own (see ``TaskSection``)."""

    source: str
    params: dict[str, Any] = Field(default_factory=dict)  # of the source
    split: Literal["eval", "train"] = "eval"
    n: Count = 0  # 0: every row of a file
    k: Positive = 1
    every: Count | str = 0  # as eval.every


class EvalSection(Section):
    """Held-out score: ``k`` samples for each of ``n`` prompts, with the same noise every time.

    ``every``: steps, or training compute as "2e14 flops", "1e6 tokens", "0.5 hours", "0.5 device-hours".
    """

    every: Count | str = 20  # 0: only before and after
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
            if name == "eval":
                raise ValueError("eval.downstream.eval has the name of the main set; give it another")
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
        if self.axis is Axis.JOULES:
            raise ValueError(
                'forecast.axis is "joules", which few machines count by steps; use "device-hours"'
            )
        if self.stop and not self.enabled:
            raise ValueError(
                "forecast.stop is true with forecast.enabled false, so nothing would stop the run; "
                "drop one of them"
            )
        return self


class EngineSection(Section):
    """The sampler: its KV pool and batch; ``threads`` is "auto" (measured once per machine) or a number.

    ``weights``: "model" shares the trainer's own; the others are a copy of the base beside it, in which the
    sampler computes in bfloat16, with linear maps of 8 bits for "int8" and "fp8". Adapters come on top.
    """

    weights: Literal["model", "bf16", "int8", "fp8"] = "model"
    kv_memory_mb: Positive = 512
    max_batch: Positive = 256  # sequences decoded together
    native: bool = True  # C++ kernels where a compiler is found
    threads: Positive | Literal["auto"] = "auto"


class DraftSection(Section):
    """Guesses from what was sampled before, verified by the engine: the same tokens in fewer passes."""

    enabled: bool = True
    memory_mb: Positive = 256  # of past answers, over all prompts
    epochs: Positive = 3  # kept of each prompt
    leaves: Positive = 4  # most leaves of a draft while few sequences run; 1: chains only
    run_ahead: bool = False  # idle slots sample the next step's prompts, for drafts

    @model_validator(mode="after")
    def _check(self) -> DraftSection:
        if self.run_ahead and not self.enabled:
            raise ValueError(
                "draft.run_ahead is true with draft.enabled false, so nothing would use what it samples; "
                "drop one of them"
            )
        return self


class LedgerSection(Section):
    """What the run is on, and what that costs: hours x ``devices`` are device hours, idle ones too."""

    devices: Positive = 1  # this machine, or its GPUs
    price_per_device_hour: Annotated[float, Field(ge=0)] = 0.0  # 0: not known
    currency: str = "USD"


class LogSection(Section):
    """``dir`` holds the run folders; JSONL is always written, ``writers`` come on top."""

    dir: str = "runs"
    writers: Annotated[tuple[Literal["tensorboard", "trackio", "wandb"], ...], Field(strict=False)] = ()
    trajectories_every: Count = 10  # steps; 0: never
    mismatch_every: Count = 25  # steps between measurements of sampler against trainer; 0: never


class AblateSection(Section):
    """What ``ostinato ablate --leave-one-out`` compares the recipe with: name = the overrides of an arm."""

    arms: dict[str, Names] = Field(default_factory=dict)  # e.g. "no fp32 head" = ["model.fp32_head=false"]


class Recipe(Section):
    """Everything that a run is made of. ``Recipe.load`` reads one; ``dump_toml`` writes it back."""

    name: str = "recipe"  # of the run folder; the file's name unless given
    seed: Count = 0
    model: ModelSection = ModelSection()
    adapter: AdapterSection = AdapterSection()
    task: TaskSection = TaskSection()
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    pipeline: PipelineSection = PipelineSection()
    algo: AlgoSection = AlgoSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    forecast: ForecastSection = ForecastSection()
    engine: EngineSection = EngineSection()
    draft: DraftSection = DraftSection()
    log: LogSection = LogSection()
    ledger: LedgerSection = LedgerSection()
    ablate: AblateSection = AblateSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.trainer.minibatches > (prompts := self.rollout.prompts_per_step):
            raise ValueError(
                f"trainer.minibatches is {self.trainer.minibatches} with rollout.prompts_per_step {prompts}, "
                "and every optimizer step learns from whole prompts; lower it"
            )
        if (stale := self.pipeline.staleness) >= (steps := self.trainer.steps):
            raise ValueError(
                f"pipeline.staleness is {stale} with {steps} trainer.steps, so the policy of the beginning "
                "would sample every batch; lower it, or take more steps"
            )
        if self.task.max_turns > 1 and not self.task.tools:
            raise ValueError(
                f"task.max_turns is {self.task.max_turns} but task.tools is empty, so no turn follows; "
                'name a tool, e.g. ["calculator"], or set max_turns=1'
            )
        if self.task.tools and self.task.max_turns == 1:
            raise ValueError(
                f"task.tools is {list(self.task.tools)} but task.max_turns is 1, so no reply could be read; "
                "set max_turns to 2 or more"
            )
        if self.engine.weights != "model" and self.adapter.kind == "full":
            raise ValueError(
                f'engine.weights is "{self.engine.weights}" with adapter.kind "full", whose training changes '
                "the weights that the sampler has copied; use "
                'engine.weights="model" or adapter.kind="lora"'
            )
        if self.forecast.stop and not (self.eval.at_start and self.eval.every):
            raise ValueError(
                "forecast.stop is true, but no scores come before and while the run trains; set eval.every, "
                "and leave eval.at_start on"
            )
        if self.forecast.axis == "money" and not self.ledger.price_per_device_hour:
            raise ValueError(
                'forecast.axis is "money" without a price; set ledger.price_per_device_hour, or use '
                '"device-hours"'
            )
        return self

    @classmethod
    def load(cls, path: str | Path, *overrides: str) -> Recipe:
        """Read a recipe file, or a packaged recipe by name, and apply ``section.key=value`` overrides.

        Raises ValueError, with one sentence, for whatever is missing, misspelt or of the wrong type.
        """
        file = find_recipe(path)
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"recipe {file} is not valid TOML: {error}; mend that line") from error
        tree.setdefault("name", file.stem)
        return cls.parse(override(tree, overrides))

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> Recipe:
        """Check a nested mapping. Raises ValueError with one sentence, which counts further faults."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ValueError(explain(error)) from None


def find_recipe(path: str | Path) -> Path:
    """``path`` itself, or the recipe of that name that comes with the package ("quickstart")."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    known = {f.stem: f for folder in _recipe_folders() for f in sorted(folder.glob("*.toml"))}
    if file.name == str(path) and file.stem in known and file.suffix in ("", ".toml"):
        return known[file.stem]
    near = difflib.get_close_matches(file.stem, known, n=1, cutoff=0.5)
    mend = (
        f"did you mean {near[0]}?"
        if near
        else f"give a TOML file or one of {', '.join(known) or '(none found)'}"
    )
    raise ValueError(f"recipe {str(path)!r} does not exist; {mend}")


def _recipe_folders() -> Iterator[Path]:
    package = Path(__file__).parent
    for folder in (package / "recipes", package.parent / "recipes"):  # installed | a checkout
        if folder.is_dir():
            yield folder


def override(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``tree`` with each ``a.b=value`` set. Values are TOML; what is not TOML is a bare string."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for text in overrides:
        dotted, equals, value = text.partition("=")
        path = dotted.strip().split(".")
        if not equals or not all(path):
            raise ValueError(f"override {text!r} is not of the form section.key=value; e.g. trainer.steps=10")
        table = result
        for depth, key in enumerate(path[:-1], start=1):
            below = table.get(key, {})
            if not isinstance(below, Mapping):
                raise ValueError(
                    f"override {text!r}: {'.'.join(path[:depth])} is a value, not a section; shorten it"
                )
            table[key] = dict(below)
            table = table[key]
        table[path[-1]] = _toml_value(value.strip())
    return result


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["v"]
    plain = isinstance(value, bool | int | float | str | list | dict)  # a date is a bare string to us
    return value if plain and len(parsed) == 1 else text


_MENDS = {
    "int_type": "use a whole number",
    "float_type": "use a number",
    "bool_type": "use true or false",
    "string_type": "use a string in quotes",
    "tuple_type": "use a list in brackets",
    "dict_type": "use a table",
    "model_type": "use a section of keys",
    "greater_than": "use a number above {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than": "use a number below {lt}",
    "less_than_equal": "use {le} or less",
    "finite_number": "use a finite number",
}

_UNIONS = {
    "trainer.replay": 'use true, false or "auto"',
    "engine.threads": 'use "auto" or a whole number of 1 or more',
    "reward.solved_at": 'use "full" or a number',
    "eval.every": 'use a number of steps, or an amount of compute, e.g. "2e14 flops"',
}


def explain(error: ValidationError) -> str:
    """The first fault in one sentence: field, value, mend. The number of other faults follows in brackets."""
    faults = error.errors(include_url=False)
    first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")  # a typo explains the rest
    fields = {fault["loc"][:2] for fault in faults}  # members of a union report one fault each
    more = f" (and {len(fields) - 1} more in this recipe)" if len(fields) > 1 else ""
    return _sentence(first) + more


def _sentence(fault: Any) -> str:
    loc = [str(part) for part in fault["loc"]]
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if fault["type"] == "extra_forbidden":
        return _unknown_key(loc)
    field = _dotted(loc)
    if fault["type"] == "missing":
        return f"{field} is missing; every {_dotted(loc[:-2])} section names its own"
    if (union := "eval.every" if _is_schedule(loc) else field) in _UNIONS:  # pydantic reports each branch
        mend = _UNIONS[union]
    elif fault["type"] in ("literal_error", "enum"):
        mend = f"use one of {fault['ctx']['expected'].replace(' or ', ', ')}"
    else:
        mend = str(_MENDS.get(fault["type"], fault["msg"])).format(**fault.get("ctx", {}))
    return f"{field} is {fault['input']!r}; {mend}"


def _dotted(loc: Sequence[str]) -> str:
    depth = 4 if loc[:2] == ["eval", "downstream"] else 2  # its sets are sections by name
    text = ".".join(loc[:depth])
    return text + "".join(f"[{part}]" for part in loc[depth:] if part.isdigit())


def _is_schedule(loc: Sequence[str]) -> bool:
    return loc[:2] == ["eval", "downstream"] and loc[3:4] == ["every"]


def _unknown_key(loc: Sequence[str]) -> str:
    parent, key = tuple(loc[:-1]), loc[-1]
    keys = dict(_all_keys())
    here = keys.get(parent, tuple(DownstreamSection.model_fields))  # no other section is so deep
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    elsewhere = [".".join((*path, key)) for path, names in keys.items() if key in names and path != parent]
    if near:
        mend = f"did you mean {'.'.join((*parent, near[0]))}?"
    elif elsewhere:
        mend = f"did you mean {elsewhere[0]}?"
    else:
        mend = f"the keys of {'.'.join(parent) or 'a recipe'} are {', '.join(here)}"
    return f"{'.'.join(loc)} is not a key of a recipe; {mend}"


def _all_keys() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """((path of a section), (its keys)) for the root and each section."""
    yield (), tuple(Recipe.model_fields)
    for name, section in typing.get_type_hints(Recipe).items():
        if isinstance(section, type) and issubclass(section, Section):
            yield (name,), tuple(section.model_fields)


def dump_toml(recipe: Recipe) -> str:
    """The resolved tree as TOML; ``Recipe.parse(tomllib.loads(dump_toml(r))) == r``."""
    return dumps(recipe.model_dump(mode="json"))


__all__ = ["Recipe", "dump_toml", "explain", "find_recipe", "override"]
