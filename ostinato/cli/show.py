"""``ostinato show``: recorded episodes of a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ostinato.cli.report import local_renderer
from ostinato.config import Recipe
from ostinato.observe.samples import Samples
from ostinato.run import RunFolder, to_json
from ostinato.terminal import say

CHARACTERS = 2000  # most of a text on the terminal

Episode = Mapping[str, Any]


def show(run: Path, step: int, *, prompts: int, answers: int, as_json: bool) -> None:
    """Print ``answers`` episodes of each of the first ``prompts`` prompts of a step (-1: the last one that is
    recorded), or one JSON object a line. Raises ValueError where the step is not recorded."""
    folder = RunFolder.open(run)
    samples = Samples(folder.trajectories.path, local_renderer(folder))
    index = samples.index(step)
    steps, groups = index["steps"], index["groups"]
    if not steps:
        raise ValueError(
            f"{run} has recorded no episodes (log.trajectories_every); let it train first, or look for "
            "those of a Tinker loop at its client"
        )
    if step not in (-1, *steps):
        steps_text = ", ".join(map(str, steps[:20])) + (f" ... {steps[-1]}" if len(steps) > 20 else "")
        raise ValueError(
            f"--step is {step}; {run} has recorded (log.trajectories_every) the steps {steps_text}"
        )
    shown_step = steps[-1] if step == -1 else step
    episodes = [
        episode
        for index, group in enumerate(groups[:prompts])
        for episode in islice(_episodes(group, samples.group(shown_step, index)), answers)
    ]
    if as_json:
        say(*map(to_json, episodes))
        return
    backend = Recipe.load(folder.recipe).model.backend
    computed = "" if backend == "native" else f", model.backend {backend}"
    episodes_here = sum(len(group["rewards"]) for group in groups)
    say(f"step {shown_step}: {len(groups)} prompts, {episodes_here} episodes{computed}")
    for episode in episodes:
        say("", *_print_episode(episode))


def _episodes(group: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[Episode]:
    """Yield the episodes of a group as JSON objects."""
    for answer in content["answers"]:
        keys = ("sample", "reward", "advantage", "parts", "reason", "stop", "ended", "last_reply", "error")
        turns = [
            {key: turn[key] for key in ("context", "text", "stop", "num_tokens", "tokens")}
            for turn in answer["turns"]
        ]
        yield {
            "step": group["step"],
            "uid": group["uid"],
            "prompt": content["messages"],
            "turns": turns,
            **{key: answer[key] for key in keys},
        }


def _print_episode(episode: Episode) -> Iterator[str]:
    """Yield the lines of an episode on the terminal."""
    parts = "".join(f"  {name} {_number(value)}" for name, value in episode["parts"].items())
    reason = f" ({episode['reason']})" if episode["reason"] else ""
    yield f"{episode['uid']}, answer {episode['sample'] + 1}"
    advantage = "" if episode["advantage"] is None else f"  advantage {_number(episode['advantage'])}"
    yield f"  reward {_number(episode['reward'])}{reason}{parts}{advantage}"
    for message in episode["prompt"]:
        yield from _print_block(message["role"] or "prompt", message["content"])
    for index, turn in enumerate(episode["turns"]):
        context = turn["context"]  # None without the tokenizer
        if context and (index or episode["prompt"][-1]["content"] not in context):  # else it is the prompt
            yield from _print_block("context", context)
        yield from _print_block(f"answer, {turn['num_tokens']} tokens, {turn['stop']}", turn["text"])
    if episode["last_reply"]:
        yield from _print_block("last reply, which the policy did not read", episode["last_reply"])
    ended = f", {episode['ended']} by the environment" if episode["ended"] else ""
    yield f"  ends with {episode['stop']}{ended}" + (f": {episode['error']}" if episode["error"] else "")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _print_block(head: str, text: str) -> Iterator[str]:
    """Yield an indented text under its ``head``, cut to CHARACTERS."""
    yield f"  [{head}]"
    yield from (f"    {line}" for line in text[:CHARACTERS].splitlines())
    if (num_hidden := len(text) - CHARACTERS) > 0:
        yield f"    ... ({num_hidden:,} more characters, with --json)"
