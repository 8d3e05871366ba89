"""Environments of other packages (OpenEnv, gem-llm, textarena, textworld) as ``task.env``.

    [task]
    source = "seeds"
    env = "ostinato.env.adapters:Gem"
    env_params = {id = "game:GuessTheNumber-v0-easy", action = "\\\\boxed{{{number}}}"}

``action`` is the format in which an answer is sent to the game: "{text}" is the answer itself, "{number}" its
last number, so that a small model that writes plain numbers can play games that require a box. ``shown`` is a
regular expression: where it matches a game's text, the policy gets only the matches, one per line. So a game
of 500 bytes of English becomes one of 20 for a model that knows no English.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import random
import re
import tempfile
import urllib.request
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"-?[0-9]+")
SCHEMA_S = 10.0  # for a server to send the schema of its actions and observations
Step = tuple[str, float, bool, bool, dict[str, Any]]


def _import_package(name: str, install: str) -> Any:
    """Import a module of an environment, without its prints. Raises ValueError, with the package to install,
    if it is missing."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some packages print a greeting
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"this environment needs {error.name}; install it: pip install {install}") from error


def _format_action(template: str, text: str) -> str:
    """Format an answer as an action, by its text or its last number."""
    numbers = _NUMBER.findall(text)
    return template.format(text=text, number=numbers[-1] if numbers else "")


def _select_matches(pattern: re.Pattern[str], text: str) -> str:
    """Return the matches of ``pattern``, one per line; the whole text if there are none."""
    matches = [match.group() for match in pattern.finditer(text)] if pattern.pattern else []
    return "\n".join(matches) or text


class OpenEnv:
    """The environment of OpenEnv that is served at ``url``, with a session for each episode.

    ``action`` is the field of an action that takes the answer. ``observation`` is the format in which the
    policy reads an observation, as "{question}, {turns} turns left". The default of both is the only text
    field of the action or observation. ``fields`` are the other fields of an action.
    """

    def __init__(self, url: str, action: str = "", observation: str = "", **fields: Any) -> None:
        client = _import_package("openenv.core", "openenv-core").GenericEnvClient
        self._field = action or _find_text_field(url, "action")
        self._template = observation or f"{{{_find_text_field(url, 'observation')}}}"
        self._fields, self._client = fields, client(base_url=url).sync()

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return self._template.format(**self._client.reset(seed=seed).observation), {}

    def step(self, action: str) -> Step:
        result = self._client.step({**self._fields, self._field: action})
        return self._template.format(**result.observation), float(result.reward or 0), result.done, False, {}

    def close(self) -> None:
        self._client.close()


@functools.cache
def _find_text_field(url: str, name: str) -> str:
    """Ask the server at ``url`` for the one field of its actions or observations (``name``) that is a text.
    Raises ValueError unless exactly one field is, and OSError where the server cannot be reached. Results are
    cached."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=SCHEMA_S) as reply:
        properties = json.load(reply)[name]["properties"]
    texts = [field for field, kind in properties.items() if kind.get("type") == "string"]
    if len(texts) != 1:
        raise ValueError(f"the {name} has the texts {texts}; name one in task.env_params.{name}")
    return texts[0]


class Gem:
    """The gem-llm game ``id``; ``params`` are passed to ``gem.make``."""

    def __init__(self, id: str, action: str = "{text}", shown: str = "", **params: Any) -> None:
        self._env, self._template = _import_package("gem", "gem-llm").make(id, **params), action
        self._pattern = re.compile(shown)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        random.seed(seed)  # its games use the global generator
        text, info = self._env.reset(seed=seed)
        return _select_matches(self._pattern, f"{text}{info.get('suffix', '')}"), {}

    def step(self, action: str) -> Step:
        text, reward, terminated, truncated, info = self._env.step(_format_action(self._template, action))
        reply = _select_matches(self._pattern, f"{text}{info.get('suffix', '')}")
        return reply, float(reward), bool(terminated), bool(truncated), {}


class TextArena:
    """The single-player textarena game ``id``; ``params`` are passed to ``textarena.make``."""

    def __init__(self, id: str, action: str = "{text}", shown: str = "", **params: Any) -> None:
        self._env, self._template = (
            _import_package("textarena", "textarena").make(env_id=id, **params),
            action,
        )
        self._pattern = re.compile(shown)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        random.seed(seed)  # its games use the global generator
        self._env.reset(num_players=1, seed=seed)
        self._earlier_observation = ""
        return self._read_new_observation(), {}

    def step(self, action: str) -> Step:
        terminated, _ = self._env.step(action=_format_action(self._template, action))
        if not terminated:
            return self._read_new_observation(), 0.0, False, False, {}
        rewards, _ = self._env.close()
        return "", float(rewards.get(0, 0.0)), True, False, {}

    def _read_new_observation(self) -> str:
        """Return the new part of the observation, and remember the observation: some games repeat all of the
        earlier text."""
        _, observation = self._env.get_observation()
        if not isinstance(observation, str):
            observation = "\n".join(str(part[1]) for part in observation)  # (from whom, message, kind)
        previous_text, self._earlier_observation = self._earlier_observation, observation
        return _select_matches(
            self._pattern, observation.removeprefix(previous_text).strip() if previous_text else observation
        )


class TextWorld:
    """A textworld game for each seed, generated offline: ``rooms``, ``objects`` and ``quest`` steps. The
    admissible commands are listed with numbers; an answer is a command, or ends in a number from the list.
    Each game is compiled once per process, which takes about a second."""

    def __init__(self, rooms: int = 1, objects: int = 2, quest: int = 1, shown: str = "") -> None:
        self._textworld = _import_package("textworld", "textworld")
        self._size, self._pattern = (rooms, objects, quest), re.compile(shown)
        self._env, self._score = None, 0.0
        self._commands: list[str] = []

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        file = _compile_game(self._textworld, self._size, seed % 2**31)
        infos = self._textworld.EnvInfos(admissible_commands=True, score=True, max_score=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # textworld warns that a generated game is not published
            self._env = self._textworld.start(file, infos)
            return self._describe_state(self._env.reset()), {}

    def step(self, action: str) -> Step:
        assert self._env is not None
        numbers = _NUMBER.findall(action)
        number = int(numbers[-1]) if numbers else 0
        command = self._commands[number - 1] if 1 <= number <= len(self._commands) else action.strip()
        state, _, terminated = self._env.step(command)
        gain, self._score = (state.score or 0) - self._score, float(state.score or 0)
        return self._describe_state(state), gain / max(state.max_score or 1, 1), bool(terminated), False, {}

    def _describe_state(self, state: Any) -> str:
        """Describe a state with a numbered list of its commands, and remember these for the next answer."""
        self._commands = sorted(state.admissible_commands or ())
        menu = "\n".join(f"{number} {command}" for number, command in enumerate(self._commands, 1))
        text = re.sub(r"\n\s*\n[\s>]*(-=.*)?", "\n", state.feedback).strip()  # without the status line
        return _select_matches(self._pattern, f"{text}\n{menu}")

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


@functools.cache
def _open_games_folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder of compiled games, once. It is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ostinato-textworld-")


@functools.cache
def _compile_game(textworld: Any, size: tuple[int, int, int], seed: int) -> str:
    """Compile a game, once per process, and return the path of its file."""
    options = textworld.GameOptions()
    options.nb_rooms, options.nb_objects, options.quest_length = size
    name = "-".join(map(str, (*size, seed)))
    options.seeds, options.path = seed, str(Path(_open_games_folder().name) / f"{name}.z8")
    return textworld.make(options)[0]
