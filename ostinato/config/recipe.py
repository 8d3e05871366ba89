"""The whole recipe: its sections, checks across them, the files it is read from, and overrides."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator
from tomli_w import dumps

from ostinato.config.explain import explain
from ostinato.config.fields import ALGO, PathKind, Seed, comments_of, make_absolute, map_paths
from ostinato.config.sections import (
    AblateSection,
    AdapterSection,
    AlgoSection,
    ClusterSection,
    DraftSection,
    EngineSection,
    EvalSection,
    ForecastSection,
    ForgettingSection,
    LedgerSection,
    LogSection,
    MemorySection,
    ModelSection,
    ParallelSection,
    PipelineSection,
    RewardSection,
    RolloutSection,
    Section,
    SftSection,
    TeacherSection,
    TrainerSection,
)
from ostinato.config.tasks import VERIFIERS, MixedTask, OneTask, TaskSection
from ostinato.inputs import has_surrogate, parse_toml
from ostinato.other_names import key_hint

# Removed keys, with the value that every run has now.
FORMER = {
    "memory.importance": "",
    "reward.judge_cache": 65_536,
    "cluster.share_weights": True,
    "trainer.max_refused_in_a_row": 5,
    "cluster.max_restarts": 5,
    "draft.memory_mb": 256,
    "draft.epochs": 3,
    "teacher.timeout_s": 60.0,
    "teacher.max_retries": 4,
    "reward.judge_pairs": "ring",
    "cluster.pin": False,
}


class Recipe(Section):
    """All settings of a run. ``Recipe.load`` reads one; ``dump_toml`` writes it back."""

    name: str = "recipe"  # of the run folder; the file's name unless given
    seed: Seed = 0  # of the adapter's start and the noise of sampling; prompts and their order: task.seed
    model: ModelSection = ModelSection()
    adapter: AdapterSection = AdapterSection()
    teacher: TeacherSection = TeacherSection()
    task: TaskSection = TaskSection()
    memory: MemorySection = MemorySection()
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    pipeline: PipelineSection = PipelineSection()
    algo: AlgoSection = AlgoSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    forecast: ForecastSection = ForecastSection()
    forgetting: ForgettingSection = ForgettingSection()
    engine: EngineSection = EngineSection()
    draft: DraftSection = DraftSection()
    log: LogSection = LogSection()
    ledger: LedgerSection = LedgerSection()
    cluster: ClusterSection = ClusterSection()
    parallel: ParallelSection = ParallelSection()
    ablate: AblateSection = AblateSection()
    sft: SftSection = SftSection()

    @model_validator(mode="before")
    @classmethod
    def _choose_reward(cls, tree: Any) -> Any:
        """An environment's reward is its own where no other is named."""
        task, reward = tree.get("task"), tree.get("reward", {})
        of_env = isinstance(task, Mapping) and task.get("env") and isinstance(reward, Mapping)
        return {**tree, "reward": {"functions": ["env"], **reward}} if of_env else tree

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        """Raises ValueError for keys of different sections that exclude each other."""
        if not self.name.isprintable() or Path(self.name).name != self.name or self.name == "..":
            raise ValueError(f"name is {self.name!r}, which is no name for the folder of a run; use a word")
        if given := [key for key in self.algo.model_extra or {} if not key.startswith("epsilon")]:
            known = comments_of((ALGO / "algorithms.py").read_text(encoding="utf-8"))["Algorithm"]
            known.pop("overridden")
            if unknown := [key for key in given if key not in known]:
                near = difflib.get_close_matches(unknown[0], known, n=1)
                fix = f"did you mean {near[0]!r}? " if near else ""
                fix = key_hint(unknown[0]) or f"{fix}known: {', '.join(known)}"
                raise ValueError(f"algo.{unknown[0]} is not a key; {fix}")
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
        for name, task in self.task.by_name.items():
            self._check_task(f"task.mix.{name}" if name else "task", task, self.judges(name))
        self._check_mixture()
        self._check_bounds()
        if self.parallel.sharded and self.cluster.remote_trainer:
            raise ValueError(
                f"parallel.layout is {self.parallel.layout!r} with cluster.remote_trainer true, but the "
                "ranks of a sharded trainer are started beside the loop; set cluster.remote_trainer to false"
            )
        self._check_storage()
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
        if (self.eval.shares or self.trainer.until < 1) and not self.trainer.budget:
            raise ValueError(
                f"eval.shares is {list(self.eval.shares)} and trainer.until {self.trainer.until:g} without "
                "trainer.budget, of which they are shares; set it, or use eval.every and trainer.steps"
            )
        if self.forecast.axis == "money" and not self.ledger.price_per_device_hour:
            raise ValueError(
                'forecast.axis is "money" without a price; set ledger.price_per_device_hour, or use '
                '"device-hours"'
            )
        return self

    def _check_storage(self) -> None:
        """Raises ValueError for keys that exclude the ``model.storage``."""
        if self.model.storage == "same":
            return
        storage = f'model.storage is "{self.model.storage}"'
        if self.adapter.kind == "full":
            raise ValueError(
                f'{storage} with adapter.kind "full", whose steps are smaller than that can hold; use '
                'model.storage="same" or adapter.kind="lora"'
            )
        if (layout := self.parallel.layout) not in ("", "1"):
            raise ValueError(
                f"{storage} with parallel.layout {layout!r}, and shares of a model are stored as they are "
                'computed; use model.storage="same", or one rank'
            )
        if self.model.storage == "int8" and self.engine.weights != "model":
            raise ValueError(
                f'{storage} with engine.weights "{self.engine.weights}", a copy of a base that is wide; use '
                'engine.weights="model", and sampler and trainer have the same 8 bits'
            )
        if self.model.storage == "int8" and self.engine.backend == "vllm":
            raise ValueError(
                f'{storage} with engine.backend "vllm", which has its own weights; use model.storage="same"'
            )

    def judges(self, task: str) -> RewardSection:
        """The rewards of the task with this name ("" for the only one): those that it names, with their
        weights. Raises KeyError for an unknown task."""
        section, reward = self.task.by_name[task], self.reward
        if not (names := section.rewards if isinstance(section, MixedTask) else ()):
            return reward
        weights = dict(zip(reward.functions, reward.weights, strict=True)) if reward.weights else {}
        chosen_weights = tuple(weights[name] for name in names if name in weights)
        return reward.model_copy(update={"functions": names, "weights": chosen_weights})

    def _check_task(self, where: str, task: OneTask, reward: RewardSection) -> None:
        """Raises ValueError for keys of a task that exclude each other; ``where``: its section."""
        if unknown := [name for name in reward.functions if name not in self.reward.functions]:
            raise ValueError(
                f"{where}.rewards has {unknown[0]!r}, which is none of reward.functions "
                f"{list(self.reward.functions)}; add it there"
            )
        if task.env and task.tools:
            raise ValueError(
                f"{where}.tools is {list(task.tools)} with {where}.env {task.env!r}; name methods of the "
                "class as its tools"
            )
        agents = [key for key in ("agent", "agent_command", "agent_url") if getattr(task, key)]
        if len(agents) > 1 or (agents and (task.env or task.tools)):
            raise ValueError(
                f"an agent has its own environment and tools; of {where}.agent, {where}.agent_command, "
                f"{where}.agent_url, {where}.env and {where}.tools only one can be given"
            )
        if task.agent.startswith(VERIFIERS) and task.source != OneTask().source:
            raise ValueError(
                f"{where}.source is {task.source!r} beside {where}.agent {task.agent!r}; leave it out"
            )
        if task.agent_url and not task.agent_url.startswith(("http://", "https://")):
            raise ValueError(f'{where}.agent_url is {task.agent_url!r}; give it as "http://host:8000/path"')
        if not task.agent_elsewhere and (task.agent_host != "127.0.0.1" or task.agent_address):
            raise ValueError(
                f"{where}.agent_host and {where}.agent_address are for agents elsewhere, and those of this "
                f'run are started by it; leave them out, or set {where}.agent="remote" or {where}.agent_url'
            )
        if task.agent_host in ("0.0.0.0", "::") and not task.agent_address:
            raise ValueError(
                f"{where}.agent_host is {task.agent_host!r}, which is every address of this machine; set "
                f'{where}.agent_address to the one that agents use, e.g. "http://trainer:8100"'
            )
        if task.agent_tool_calls == "equals" and not (task.has_agent and "=" in self.rollout.stop):
            raise ValueError(
                f'{where}.agent_tool_calls is "equals", which needs an agent and answers that end there; set '
                'rollout.stop to ["="]'
            )
        if task.has_agent and self.rollout.interrupt_after:
            raise ValueError("rollout.interrupt_after is not done for agents; leave it out")
        if not (task.env or task.has_agent) and (task.source == "seeds" or "env" in reward.functions):
            key = f"{where}.source" if task.source == "seeds" else "reward.functions"
            raise ValueError(f"{key} is for an environment, and {where}.env is empty; name its class")
        if task.max_turns > 1 and not (task.tools or task.env or task.has_agent):
            raise ValueError(
                f"{where}.max_turns is {task.max_turns} but {where}.tools is empty, so no turn follows; "
                'name a tool, e.g. ["calculator"], or set max_turns=1'
            )
        if task.tools and task.max_turns == 1:
            raise ValueError(
                f"{where}.tools is {list(task.tools)} but {where}.max_turns is 1, so no reply could be read; "
                "set max_turns to 2 or more"
            )

    def _check_mixture(self) -> None:
        """Raises ValueError for tasks that cannot be mixed, and unknown tasks of downstream sets."""
        marks = {name: self.judges(name).full_marks for name in self.task.by_name}
        best, least = max(marks, key=marks.__getitem__), min(marks, key=marks.__getitem__)
        if self.reward.solved_at == "full" and marks[best] != marks[least]:
            raise ValueError(
                f'reward.solved_at is "full", which is a reward of {marks[best]:g} for the task {best!r} and '
                f"of {marks[least]:g} for {least!r}; set reward.weights so that they are equal, or solved_at"
            )
        agents = [task for task in self.task.by_name.values() if task.has_agent]
        for key in ("agent_host", "agent_port", "agent_address", "agent_tool_calls", "agent_wait_s"):
            if len(values := {getattr(task, key) for task in agents}) > 1:
                raise ValueError(
                    f"task.mix has {len(values)} values of {key}, and agents of a run share one server; give "
                    "all of them the same"
                )
        for name, downstream in self.eval.downstream.items():
            if downstream.task and downstream.task not in marks:
                raise ValueError(
                    f"eval.downstream.{name}.task is {downstream.task!r}; use one of the tasks of task.mix: "
                    f"{[*filter(None, marks)]}"
                )

    def _check_bounds(self) -> None:
        """Raises ValueError where a part with its own time limit may outlast ``pipeline.watch_s``."""
        watch, reward = self.pipeline.watch_s, self.reward
        functions = len(reward.functions)
        grading = 60 + 2 * functions * reward.timeout_s
        if watch <= grading:
            raise ValueError(
                f"pipeline.watch_s is {watch:g}, but rewards may take {grading:g} s (twice reward.timeout_s "
                f"for each of {functions} functions, and 60 for a new process), so a hung one would end the "
                "run instead of being replaced; raise watch_s or lower timeout_s"
            )
        if watch <= reward.judge_timeout_s and any(
            function.startswith("judge:") for function in reward.functions
        ):
            raise ValueError(
                f"pipeline.watch_s is {watch:g} and reward.judge_timeout_s {reward.judge_timeout_s:g}, so a "
                "judge that hangs would end the run instead of being counted; raise watch_s"
            )
        replacing = self.cluster.silence_s + self.cluster.start_s
        if self.cluster.samplers and watch <= replacing:
            raise ValueError(
                f"pipeline.watch_s is {watch:g}, but a lost worker is replaced within {replacing:g} s "
                "(cluster.silence_s + cluster.start_s), so the run would end before; raise it above that"
            )
        if self.parallel.sharded and watch <= self.parallel.timeout_s:
            raise ValueError(
                f"pipeline.watch_s is {watch:g}, but a collective may take {self.parallel.timeout_s:g} s "
                "(parallel.timeout_s), so a hung rank would end the run before it is named; raise watch_s or "
                "lower timeout_s"
            )

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], *overrides: str) -> Recipe:
        """Read a recipe file, a packaged recipe by name, or its tree as a mapping, and apply
        ``section.key=value`` overrides. Relative paths begin at the folder of the file, in overrides and
        mappings at the current one (``config.fields``).

        Raises ValueError, with one sentence, for whatever is missing, misspelt or of the wrong type.
        """
        if isinstance(source, Mapping):
            return cls.parse(resolve_paths(override(source, overrides), Path()))
        file = find_recipe(source)
        try:
            tree = parse_toml(file.read_text(encoding="utf-8"))
        except ValueError as error:  # no TOML, or no UTF-8
            raise ValueError(f"recipe {file} is not valid TOML: {error}; fix that line") from error
        tree.setdefault("name", file.stem)
        return cls.parse(resolve_paths(override(resolve_paths(tree, file.parent), overrides), Path()))

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> Recipe:
        """The recipe of a nested mapping. Raises ValueError with the first fault and the number of others."""
        for section, keys in tree.items():
            for key, value in keys.items() if isinstance(keys, Mapping) else [("", keys)]:
                if has_surrogate([section, key, value]):  # from a command line that is no UTF-8
                    name = f"{section}.{key}".rstrip(".")
                    raise ValueError(f"{name!r} is {value!r}, which is not UTF-8; give it another name")
        tree = {  # recipes of older runs have these keys
            section: {key: value for key, value in keys.items() if FORMER.get(f"{section}.{key}") != value}
            if isinstance(keys, Mapping)
            else keys
            for section, keys in tree.items()
        }
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ValueError(explain(error, cls)) from None


def find_recipe(path: str | Path) -> Path:
    """``path`` itself if it is a file, else the packaged recipe of that name ("quickstart"). Raises
    ValueError."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    recipes = {
        path_of.stem: path_of for folder in _list_folders() for path_of in sorted(folder.glob("*.toml"))
    }
    name = str(path).removesuffix(".toml")  # "laptop-1.5b" has a dot of its own
    if name in recipes:
        return recipes[name]
    matches = difflib.get_close_matches(Path(name).name, recipes, n=1, cutoff=0.5)
    fix = (
        f"did you mean {matches[0]}?"
        if matches
        else f"give a TOML file or one of {', '.join(recipes) or '(none found)'}"
    )
    raise ValueError(f"recipe {str(path)!r} does not exist; {fix}")


def beside_recipes(name: str) -> Path:
    """Path of a file that is packaged with the recipes. Raises ValueError if there is none."""
    for folder in _list_folders():
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{name} is not among the recipes of this program; install it again")


def _list_folders() -> Iterator[Path]:
    """Yield the existing folders of packaged recipes."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):  # installed | a checkout
        if folder.is_dir():
            yield folder


def resolve_paths(tree: Mapping[str, Any], base: Path, section: type[Section] = Recipe) -> dict[str, Any]:
    """A copy of ``tree``, the keys of ``section``, with relative paths, those of overrides too, made absolute
    from ``base``."""

    def change(_: str, kind: PathKind, text: str) -> str:
        return _resolve_override(text, base) if kind is PathKind.OVERRIDE else make_absolute(kind, text, base)

    return map_paths(tree, section, change)


def _resolve_override(text: str, base: Path) -> str:
    """``key=value`` with a relative path in the value made absolute from ``base``."""
    if "=" not in text:
        return text
    tree = override({}, [text])
    if (resolved := resolve_paths(tree, base)) == tree:
        return text
    dotted = text.partition("=")[0].strip()
    return f"{dotted}={_to_toml(reduce(getitem, dotted.split('.'), resolved))}"


def _to_toml(value: Any) -> str:
    """``value`` as TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_to_toml(item)}" for key, item in value.items()) + "}"
    return f"[{', '.join(map(_to_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def override(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``tree`` with each ``a.b=value`` set. A value that is not TOML is a bare string. Raises
    ValueError for another form."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for text in overrides:
        dotted, equals, value = text.partition("=")
        path = dotted.strip().split(".")
        if not equals or not all(path):
            raise ValueError(f"override {text!r} is not of the form section.key=value; e.g. trainer.steps=10")
        table = result
        for depth, key in enumerate(path[:-1], start=1):
            subtable = table.get(key, {})
            if not isinstance(subtable, Mapping):
                raise ValueError(
                    f"override {text!r}: {'.'.join(path[:depth])} is a value, not a section; shorten it"
                )
            table[key] = dict(subtable)
            table = table[key]
        table[path[-1]] = _parse_value(value.strip())
    return result


def _parse_value(text: str) -> Any:
    """The TOML value of ``text``; ``text`` itself if it is none, or a date."""
    try:
        parsed = parse_toml(f"v = {text}")
    except ValueError:
        return text
    value = parsed["v"]
    is_plain = isinstance(value, bool | int | float | str | list | dict)  # a date stays a bare string
    return value if is_plain and len(parsed) == 1 else text


def merge(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """``recipe`` with ``changes`` on top: sections as mappings of keys, and keys outside of sections.
    Relative paths begin at the current folder. Raises ValueError as ``Recipe.load``."""
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    for key, value in resolve_paths(changes, Path()).items():
        section = tree.get(key)
        tree[key] = (
            {**section, **value} if isinstance(value, Mapping) and isinstance(section, Mapping) else value
        )
    return Recipe.parse(tree)


def dump_toml(recipe: Recipe) -> str:
    """The resolved tree as TOML; ``Recipe.parse(tomllib.loads(dump_toml(r))) == r``."""
    return dumps(recipe.model_dump(mode="json"))
