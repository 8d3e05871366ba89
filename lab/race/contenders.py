"""One run of a race by each contender: its costs up to every checkpoint, and the held-out scores there."""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from lab.race.curves import compute
from lab.race.meter import Meter
from lab.settings import torch_threads
from lab.train import PEERS, run
from lab.whole_runs import trained
from ostinato.config import Recipe
from ostinato.types import Prompt

ROOT = Path(__file__).parents[2]
Setting = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """What both do: ``steps`` of ``recipe`` with ``overrides``, a checkpoint every ``every`` of them. Scores
    are of ``eval_n`` held-out prompts in fp32; every 0: no checkpoints, no scores."""

    recipe: str
    overrides: tuple[str, ...]
    steps: int
    every: int
    eval_n: int
    trl_python: str | None
    limit_s: float = 3600.0  # of a run
    check: bool = False  # TRL answers the held-out prompts as well

    @property
    def checkpoints(self) -> list[int]:
        return list(range(self.every, self.steps + 1, self.every)) if self.every else []

    def keys(self, seed: int, *more: str) -> list[str]:
        return [*self.overrides, f"seed={seed}", *more]

    def ours(self, setting: Setting, seed: int) -> dict[str, Any]:
        """``setting``: keys of the recipe."""
        keys = self.keys(
            seed, f"trainer.steps={self.steps}", "eval.every=0", "eval.at_start=false", "eval.n=8"
        )
        keys += [f"trainer.checkpoint_every={self.every}", "trainer.keep_checkpoints=100000"]
        keys += [f"{key}={value}" for key, value in setting.items()]
        with tempfile.TemporaryDirectory() as logs:
            with closing(Meter()) as meter:
                folder = trained(
                    self.recipe,
                    keys,
                    Path(logs),
                    f"of seed {seed}",
                    limit_s=self.limit_s,
                    started=meter.follow,
                )
            spans = list(folder.timeline.rows())
            rows = list(folder.metrics.rows())
            worked = [span for span in spans if span["kind"] != "save" and "step" in span]
            ends = [max(one["to"] for one in worked if one["step"] == row["step"]) for row in rows]
            saved = [(span["from"], span["to"]) for span in spans if span["kind"] == "save"]
            found = meter.course(min(one["from"] for one in worked), ends, saved)
            found["flops"] = [0.0, *(row["total/compute_flops"] for row in rows)]
            split = {
                part: statistics.median(row[f"time/{part}_s"] for row in rows[1:] or rows)
                for part in ("rollout", "reward", "train", "measure", "other")
            }
            dtype = Recipe.load(folder.recipe).model.dtype
            facts = {"rewards": [row["reward"] for row in rows], "split": split, "dtype": dtype}
            return self._scored(found, seed, run=str(folder.path)) | facts

    def trl(self, setting: Setting, seed: int) -> dict[str, Any]:
        """``setting``: threads (of ``torch_threads``), dtype, batch, paged, lr, loss, experts, prompts,
        minibatches."""
        assert self.trl_python is not None
        recipe = Recipe.load(self.recipe, *self.keys(seed))
        with tempfile.TemporaryDirectory() as made:
            task = self._task(recipe, setting, Path(made)) | {"seed": seed}
            command = [self.trl_python, str(PEERS / "trl_race.py"), json.dumps(task)]
            with closing(Meter()) as meter:
                environ = torch_threads()[setting["threads"]]
                report = run("trl", command, environ, limit_s=self.limit_s, started=meter.follow)
            found = meter.course(report["start"], report["ends"], report["pauses"])
            model = flop_model(recipe, bool(setting["experts"]))
            spent = (compute(model, groups) for groups in report["groups"])
            found["flops"] = list(accumulate(spent, initial=0.0))
            facts = {name: report[name] for name in ("rewards", "check", "ready")}
            return self._scored(found, seed, peft=made) | facts

    def _task(self, recipe: Recipe, setting: Setting, made: Path) -> dict[str, Any]:
        rows = prompts_in_order(recipe, self.steps * setting["prompts"])
        (made / "rows").write_text("".join(map(_line, rows)))
        check = ""
        if self.check:
            check = str(made / "check")
            Path(check).write_text("".join(map(_line, held_out(recipe, self.eval_n))))
        (reward,) = recipe.reward.functions
        scale = "none" if setting["loss"] == "dr_grpo" else "group"
        return {
            "folder": str(folder_of(recipe)),
            "rows": str(made / "rows"),
            "check": check,
            "reward": reward,
            "paths": [str(ROOT), sysconfig.get_paths()["purelib"]],
            "group": recipe.rollout.group_size,
            "prompts": setting["prompts"],
            "steps": self.steps,
            "max_tokens": recipe.rollout.max_tokens,
            "batch": setting["batch"],
            "minibatches": setting["minibatches"],
            "dtype": setting["dtype"],
            "lr": setting["lr"],
            "warmup": recipe.trainer.warmup_steps,
            "loss": setting["loss"],
            "scale": scale,
            "lora": lora(recipe, bool(setting["experts"])),
            "paged": setting["paged"],
            "every": self.every or self.steps + 1,
            "output": str(made),
        }

    def _scored(self, found: dict[str, list[float]], seed: int, **of: str) -> dict[str, Any]:
        """At checkpoints, with the score of each; without these, of every step."""
        seconds = [b - a for a, b in zip(found["wall_s"], found["wall_s"][1:], strict=False)]
        facts: dict[str, Any] = {"step_s": seconds}
        if not self.every:
            return facts
        keys = self.keys(seed, "model.dtype=float32", f"eval.n={self.eval_n}", "eval.k=1")
        task = {"recipe": self.recipe, "overrides": keys, "steps": self.checkpoints, "run": "", **of}
        if task["run"]:
            task["recipe"], task["overrides"] = task["run"], keys[len(self.overrides) + 1 :]
        command = [sys.executable, "-m", "lab.race.scores", json.dumps(task)]
        rows = run("the scorer", command, {})["rows"]
        kept = {cost: [values[step] for step in (0, *self.checkpoints)] for cost, values in found.items()}
        scores = {
            "scores": [row["pass@1"] for row in rows],
            "rewards_held_out": [row["reward"] for row in rows],
        }
        return facts | kept | scores | {"steps": [0, *self.checkpoints]}


def prompts_in_order(recipe: Recipe, count: int) -> list[dict[str, Any]]:
    """The first ``count`` prompts of a run, as it meets them."""
    from ostinato.env.tasks import Rows
    from ostinato.launch.inputs import read_prompts

    stream = Rows(read_prompts(recipe, "train", None), seed=recipe.seed)
    return _rendered(recipe, [stream.prompt(index) for index in range(count)])


def held_out(recipe: Recipe, count: int) -> list[dict[str, Any]]:
    from ostinato.launch.inputs import read_prompts

    return _rendered(recipe, read_prompts(recipe, recipe.eval.split, count))


def _rendered(recipe: Recipe, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    from ostinato.render import Renderer

    renderer = Renderer(folder_of(recipe))
    return [
        {"messages": one.messages, "columns": one.columns, "ids": renderer.prompt(one).tolist()}
        for one in prompts
    ]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=lambda value: dict(value)) + "\n"


def folder_of(recipe: Recipe) -> Path:
    from ostinato.model.named import find_model_folder

    return find_model_folder(recipe.model.path)


def flop_model(recipe: Recipe, experts: bool) -> Any:
    """Of what TRL trains: an adapter for each expert."""
    from ostinato.model.config import read_config
    from ostinato.model.flops import FlopModel
    from ostinato.model.shapes import AdapterSpec, ExpertScheme

    section = recipe.adapter
    targets = tuple(name for name in section.targets if experts or not name.startswith("experts"))
    spec = AdapterSpec(
        rank=section.rank, alpha=section.alpha, targets=targets, expert_scheme=ExpertScheme.PER_EXPERT
    )
    return FlopModel.of(read_config(folder_of(recipe)), spec)


def lora(recipe: Recipe, experts: bool) -> dict[str, Any]:
    """PEFT's LoRA on the same maps, as our export names them; the experts of a layer are two parameters to
    it, gate_up_proj and down_proj, each with an A and a B of the recipe's rank for every expert."""
    from ostinato.launch.models import make_adapter_spec
    from ostinato.model.config import read_config
    from ostinato.model.lora import init_adapters
    from ostinato.model.peft_io import PEFT_CONFIG, write_peft

    with tempfile.TemporaryDirectory() as made:
        write_peft(
            init_adapters(read_config(folder_of(recipe)), make_adapter_spec(recipe.adapter)), Path(made)
        )
        config = json.loads((Path(made) / PEFT_CONFIG).read_text())
    parameters = [name for name in config["target_parameters"] or [] if experts or "experts" not in name]
    names = ("r", "lora_alpha", "lora_dropout", "bias", "task_type", "target_modules")
    return {name: config[name] for name in names} | {"target_parameters": parameters or None}
