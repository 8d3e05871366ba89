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

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has arrays, not tuples
Floats = Annotated[tuple[float, ...], Field(strict=False)]


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
    """What a step samples: ``prompts_per_step`` groups of ``group_size`` completions."""

    prompts_per_step: Positive = 16
    group_size: Positive = 16
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: Count = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    max_tokens: Positive = 64  # per turn
    stop: Names = ()  # strings that end an answer, beside the model's own stop tokens

    @model_validator(mode="after")
    def _check(self) -> RolloutSection:
        if "" in self.stop:
            raise ValueError("rollout.stop has an empty string, which ends every answer; remove it")
        return self


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


class EvalSection(Section):
    """Held-out score: ``k`` samples for each of ``n`` prompts, with the same noise every time."""

    every: Count = 20  # steps; 0: only before and after
    n: Positive = 256
    k: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0  # 0: greedy
    at_start: bool = True
    split: Literal["eval", "train"] = "eval"

    @model_validator(mode="after")
    def _check(self) -> EvalSection:
        if self.temperature == 0 and self.k > 1:
            raise ValueError(
                f"eval.k is {self.k} with eval.temperature 0, which draws {self.k} equal answers; "
                "set eval.k=1 or a positive temperature"
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


class LogSection(Section):
    """``dir`` holds the run folders; JSONL is always written, ``writers`` come on top."""

    dir: str = "runs"
    writers: Annotated[tuple[Literal["tensorboard", "trackio", "wandb"], ...], Field(strict=False)] = ()
    trajectories_every: Count = 10  # steps; 0: never
    mismatch_every: Count = 25  # steps between measurements of sampler against trainer; 0: never


class Recipe(Section):
    """Everything that a run is made of. ``Recipe.load`` reads one; ``dump_toml`` writes it back."""

    name: str = "recipe"  # of the run folder; the file's name unless given
    seed: Count = 0
    model: ModelSection = ModelSection()
    adapter: AdapterSection = AdapterSection()
    task: TaskSection = TaskSection()
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    algo: AlgoSection = AlgoSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    engine: EngineSection = EngineSection()
    draft: DraftSection = DraftSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        samples = self.rollout.prompts_per_step * self.rollout.group_size
        if self.trainer.minibatches > samples:
            raise ValueError(
                f"trainer.minibatches is {self.trainer.minibatches} but a step has only {samples} samples "
                "(rollout.prompts_per_step x group_size); lower it"
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
    if field in _UNIONS:  # pydantic reports each branch by itself
        mend = _UNIONS[field]
    elif fault["type"] == "literal_error":
        mend = f"use one of {fault['ctx']['expected'].replace(' or ', ', ')}"
    else:
        mend = str(_MENDS.get(fault["type"], fault["msg"])).format(**fault.get("ctx", {}))
    return f"{field} is {fault['input']!r}; {mend}"


def _dotted(loc: Sequence[str]) -> str:
    text = ".".join(loc[:2])
    return text + "".join(f"[{part}]" for part in loc[2:] if part.isdigit())


def _unknown_key(loc: Sequence[str]) -> str:
    parent, key = tuple(loc[:-1]), loc[-1]
    keys = dict(_all_keys())
    here = keys[parent]
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
    tree = recipe.model_dump(mode="json")
    lines = [f"{key} = {_literal(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, values in tree.items():
        if isinstance(values, dict):
            lines += [
                "",
                f"[{section}]",
                *(f"{_key(key)} = {_literal(value)}" for key, value in values.items()),
            ]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return '"' + "".join(_ESCAPES.get(char) or _escape(char) for char in value) + '"'
        case list() | tuple():
            return "[" + ", ".join(_literal(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_key(key)} = {_literal(item)}" for key, item in value.items()) + "}"
    raise ValueError(f"a recipe cannot hold {value!r}; use a string, number, boolean, list or table")


_ESCAPES = {'"': '\\"', "\\": "\\\\"}


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char


def _key(key: str) -> str:
    bare = key and key.isascii() and all(char.isalnum() or char in "_-" for char in key)
    return key if bare else _literal(key)


__all__ = ["Recipe", "dump_toml", "explain", "find_recipe", "override"]
