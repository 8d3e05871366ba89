"""``ostinato new``: writes a commented recipe to start from, by three answers or flags."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.cli.data import COMPARED, iterate_own_verdicts
from ostinato.config import Recipe
from ostinato.launch.inputs import read_prompts
from ostinato.reward.own_answers import FULL
from ostinato.run import atomic_write
from ostinato.terminal import announce_work, say
from ostinato.types import Prompt

TASKS = ("rows", "own", "env")
MACHINES = {  # prompts a step, answers to each, tokens of an answer, steps
    "laptop": (8, 8, 256, 60),
    "gpu": (32, 8, 1024, 200),
    "cluster": (64, 16, 4096, 400),
}
SYSTEM = {  # system prompts, so that a reward finds the answer
    "numeric": "Think step by step, then write the answer, a number, behind ####.",
    "math_verify": "Think step by step, then write the answer in \\\\boxed{}.",
    "code_tests": "Write the function in one block of Python.",
}

REWARD = '''"""Rewards: TRL's signature, all answers to one prompt in a call, None for no verdict."""


def score(completions, answer, **columns):
    """1 for an answer that ends with the row's own, else 0. Change it to what you want."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(text.strip().endswith(str(gold))) for text, gold in zip(texts, answer)]
'''

ENVIRONMENT = '''"""An environment: gymnasium's methods on text, one object for each episode."""

import random
import re


class Guess:
    """Find a number from 1 to 10 in four guesses. Change it to what you want."""

    def reset(self, *, seed, options):
        """-> (what the policy reads first, info)."""
        self.secret, self.tries = random.Random(seed).randint(1, 10), 4
        return "Guess a number from 1 to 10.", {}

    def step(self, action):
        """-> (reply, reward, terminated, truncated, info)."""
        self.tries -= 1
        numbers = re.findall(r"[0-9]+", action)
        if numbers and int(numbers[-1]) == self.secret:
            return "right", 1.0, True, False, {}
        reply = "no number" if not numbers else "higher" if int(numbers[-1]) < self.secret else "lower"
        return reply, 0.0, self.tries == 0, False, {}
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The choices that a recipe is written for."""

    task: str  # one of TASKS
    model: str
    machine: str  # a key of MACHINES
    rows: str = ""  # a file, or a source by its name


def new(path: Path, *, task: str, model: str, machine: str, rows: str) -> None:
    """Write a recipe to ``path``, and beside it the reward or environment that it uses, unless that is there.
    On a terminal, asks for empty arguments.

    Raises ValueError for a recipe that exists, and for rows that cannot be read.
    """
    if path.suffix != ".toml":
        raise ValueError(f"{path} is no recipe; give it a name that ends in .toml")
    ask: Callable[[str, str], str] = _ask if sys.stdin.isatty() else lambda question, default: default
    task = task or ("rows" if rows else _checked(ask(f"task ({', '.join(TASKS)})", "rows"), TASKS, "task"))
    if task != "env" and not rows:
        rows = ask("rows: a .jsonl or .parquet file, hf:NAME, gym:NAME, arithmetic", "arithmetic")
    model = model or ask("model: a folder, a name of the hub, smollm2-135m, asset:seed-moe", "asset:seed-moe")
    machine = machine or ask(f"machine ({', '.join(MACHINES)})", "laptop")
    choices = Choices(
        task=_checked(task, TASKS, "task"),
        model=model,
        machine=_checked(machine, MACHINES, "machine"),
        rows=rows,
    )
    companion = {"own": ("rewards.py", REWARD), "env": ("environment.py", ENVIRONMENT)}.get(task)
    if path.exists():
        raise ValueError(f"{path} exists; give the recipe another name, or remove it")
    files = {path: _recipe(choices, path.parent)}
    if companion and (beside := path.parent / companion[0]).exists():
        say(f"uses         {beside}, which was there, with its {'score' if task == 'own' else 'Guess'}")
    elif companion:
        files[beside] = companion[1]
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text.encode())
    Recipe.load(path)
    say(f"wrote        {', '.join(map(str, files))}")
    if task != "env":
        say(f"look at it   ostinato data {path}")
    say(f"train        ostinato train {path}")
    if machine == "cluster":
        say(f"plan         ostinato plan {model} --gpus 8xH100-80")


def _ask(question: str, default: str) -> str:
    """The answer on the terminal; ``default`` if empty."""
    return input(f"{question} [{default}]: ").strip() or default


def _checked(value: str, known: Any, name: str) -> str:
    """``value`` itself. Raises ValueError if it is not one of ``known``."""
    if value not in known:
        raise ValueError(f"--{name} is {value!r}; use one of {', '.join(known)}")
    return value


def _recipe(choices: Choices, folder: Path) -> str:
    """The text of the recipe; a relative path of rows is changed from the current folder to the recipe's."""
    prompts_per_step, group_size, max_tokens, steps = MACHINES[choices.machine]
    if choices.task == "env":
        return _fill_recipe(
            choices,
            task=[
                'source = "seeds"  # the rows are numbers, one for each episode',
                'env = "environment.py:Guess"',
                "max_turns = 4",
            ],
            reward='functions = ["env"]  # the sum of what step() gives',
            sizes=(prompts_per_step, group_size, 32, steps),
        )
    source = choices.rows
    if (file := Path(source).resolve()).exists():
        source = str(file.relative_to(folder.resolve()) if file.is_relative_to(folder.resolve()) else file)
    by_name = choices.rows == "arithmetic" or choices.rows.startswith("gym:")
    reward = _reward(choices, by_name)
    task = [f"source = {json.dumps(source)}"]
    if not by_name:
        task += ["n_train = 0  # all rows", 'overlong = "filter"  # prompts that leave no room for an answer']
        if reward in SYSTEM:
            task += [f'system_prompt = "{SYSTEM[reward]}"']
        task += [
            "",
            "[task.params]",
            "holdout = 0.1  # this share of the rows is evaluated on, never trained on",
        ]
        if reward not in SYSTEM:
            task += ["chat = true  # a prompt that is a text is what a user says in a chat"]
    sizes = (prompts_per_step, group_size, 48 if choices.rows == "arithmetic" else max_tokens, steps)
    return _fill_recipe(choices, task=task, reward=f"functions = [{json.dumps(reward)}]", sizes=sizes)


def _reward(choices: Choices, by_name: bool) -> str:
    """The reward's name: the user's own, or the built-in one that gives full marks to the rows' own
    answers."""
    if choices.task == "own":
        return "rewards.py:score"
    if by_name:
        return "exact" if choices.rows == "arithmetic" else "gym_score"
    recipe = Recipe.load({}, f"task.source={choices.rows}", "task.n_train=0")
    rows: list[Prompt] = read_prompts(recipe, "train", None)
    answers = [str(row.columns.get("answer", "")) for row in rows]
    is_math = all(re.search(r"[0-9\\]", answer) for answer in answers)  # else it multiplies letters of words
    with announce_work("calling the rewards on the rows' own answers"):
        for function in COMPARED:
            if function == "math_verify" and not is_math:
                continue
            verdicts = [
                verdict
                for _, some_verdicts in iterate_own_verdicts(recipe, rows, function)
                for verdict in some_verdicts
            ]
            if verdicts and all(verdict.value is not None and verdict.value >= FULL for verdict in verdicts):
                return function
    raise ValueError(
        f"no built-in reward gives full marks to the own answers of {choices.rows}; look at them "
        f"(ostinato data {choices.rows}), or use --task own, which writes a reward to change"
    )


def _fill_recipe(choices: Choices, *, task: list[str], reward: str, sizes: tuple[int, int, int, int]) -> str:
    prompts_per_step, group_size, max_tokens, steps = sizes
    small = choices.model in ("asset:seed-moe", "smollm2-135m")
    lines = [
        "# All keys: docs/recipe.md, or ostinato keys PATTERN. What is left out has its default.",
        "",
        "[model]",
        f"path = {json.dumps(choices.model)}",
        "# chat_template_kwargs = {enable_thinking = false}  # for templates that read it (Qwen3)",
        "",
        "[adapter]  # LoRA on attention, MLP and experts",
        "rank = 16",
        "alpha = 32",
        "",
        "[task]",
        *task,
        "",
        "[reward]",
        reward,
        "",
        "[rollout]",
        f"prompts_per_step = {prompts_per_step}",
        f"group_size = {group_size}  # answers to each prompt",
        f"max_tokens = {max_tokens}  # of an answer",
        "",
        "[algo]",
        'name = "dr_grpo"  # or grpo, dapo, cispo, gspo, rloo, reinforce_pp',
        "",
        "[trainer]",
        f"steps = {steps}",
        f"lr = {'1e-3' if choices.model == 'asset:seed-moe' else '2e-4' if small else '5e-5'}",
        "warmup_steps = 5",
        "",
        "[eval]",
        "every = 20  # steps",
        "n = 128  # held-out prompts",
    ]
    return "\n".join(lines) + "\n"
