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
SCHEMA_S = 10.0  # for a server to say what its actions and observations are
Step = tuple[str, float, bool, bool, dict[str, Any]]


def _package(name: str, install: str) -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some packages print a greeting
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"this environment needs {error.name}; install it: pip install {install}") from error


def _action(form: str, text: str) -> str:
    numbers = _NUMBER.findall(text)
    return form.format(text=text, number=numbers[-1] if numbers else "")


def _matches(shown: re.Pattern[str], text: str) -> str:
    matches = [match.group() for match in shown.finditer(text)] if shown.pattern else []
    return "\n".join(matches) or text


class OpenEnv:
    """The environment of OpenEnv that is served at ``url``, with a session for each episode.

    ``action`` is the field of an action that has the answer, ``observation`` what the policy is shown of an
    observation, as "{question}, {turns} turns left"; by default the only text that each of them has. Other
    fields of an action are ``fields``.
    """

    def __init__(self, url: str, action: str = "", observation: str = "", **fields: Any) -> None:
        client = _package("openenv.core", "openenv-core").GenericEnvClient
        self._field = action or _only_text(url, "action")
        self._shown = observation or f"{{{_only_text(url, 'observation')}}}"
        self._fields, self._client = fields, client(base_url=url).sync()

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return self._shown.format(**self._client.reset(seed=seed).observation), {}

    def step(self, action: str) -> Step:
        result = self._client.step({**self._fields, self._field: action})
        return self._shown.format(**result.observation), float(result.reward or 0), result.done, False, {}

    def close(self) -> None:
        self._client.close()


@functools.cache
def _only_text(url: str, name: str) -> str:
    """The field of a server's actions or observations (``name``) that has a text. Raises ValueError where
    there is not one."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=SCHEMA_S) as reply:
        properties = json.load(reply)[name]["properties"]
    texts = [field for field, kind in properties.items() if kind.get("type") == "string"]
    if len(texts) != 1:
        raise ValueError(f"the {name} has the texts {texts}; name one in task.env_params.{name}")
    return texts[0]


class Gem:
    """The gem-llm game ``id``; ``params`` are passed to ``gem.make``."""

    def __init__(self, id: str, action: str = "{text}", shown: str = "", **params: Any) -> None:
        self._env, self._form = _package("gem", "gem-llm").make(id, **params), action
        self._shown = re.compile(shown)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        random.seed(seed)  # its games use the global generator
        text, info = self._env.reset(seed=seed)
        return _matches(self._shown, f"{text}{info.get('suffix', '')}"), {}

    def step(self, action: str) -> Step:
        text, reward, ended, cut, info = self._env.step(_action(self._form, action))
        reply = _matches(self._shown, f"{text}{info.get('suffix', '')}")
        return reply, float(reward), bool(ended), bool(cut), {}


class TextArena:
    """The single-player textarena game ``id``; ``params`` are passed to ``textarena.make``."""

    def __init__(self, id: str, action: str = "{text}", shown: str = "", **params: Any) -> None:
        self._env, self._form = _package("textarena", "textarena").make(env_id=id, **params), action
        self._shown = re.compile(shown)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        random.seed(seed)  # its games use the global generator
        self._env.reset(num_players=1, seed=seed)
        self._seen = ""
        return self._new_observation(), {}

    def step(self, action: str) -> Step:
        ended, _ = self._env.step(action=_action(self._form, action))
        if not ended:
            return self._new_observation(), 0.0, False, False, {}
        rewards, _ = self._env.close()
        return "", float(rewards.get(0, 0.0)), True, False, {}

    def _new_observation(self) -> str:
        """The new part of the observation: some games repeat all of the earlier text."""
        _, observed = self._env.get_observation()
        if not isinstance(observed, str):
            observed = "\n".join(str(part[1]) for part in observed)  # (from whom, message, kind)
        before, self._seen = self._seen, observed
        return _matches(self._shown, observed.removeprefix(before).strip() if before else observed)


class TextWorld:
    """A textworld game for each seed, generated offline: ``rooms``, ``objects`` and ``quest`` steps. The
    admissible commands are listed with numbers; an answer is a command, or ends in a number from the list.
    Each game is compiled once per process, which takes about a second."""

    def __init__(self, rooms: int = 1, objects: int = 2, quest: int = 1, shown: str = "") -> None:
        self._textworld = _package("textworld", "textworld")
        self._size, self._shown = (rooms, objects, quest), re.compile(shown)
        self._env, self._score = None, 0.0
        self._commands: list[str] = []

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        file = _compile_game(self._textworld, self._size, seed % 2**31)
        needed = self._textworld.EnvInfos(admissible_commands=True, score=True, max_score=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a generated game is not a published one
            self._env = self._textworld.start(file, needed)
            return self._shown_text(self._env.reset()), {}

    def step(self, action: str) -> Step:
        assert self._env is not None
        numbers = _NUMBER.findall(action)
        number = int(numbers[-1]) if numbers else 0
        command = self._commands[number - 1] if 1 <= number <= len(self._commands) else action.strip()
        state, _, ended = self._env.step(command)
        gained, self._score = (state.score or 0) - self._score, float(state.score or 0)
        return self._shown_text(state), gained / max(state.max_score or 1, 1), bool(ended), False, {}

    def _shown_text(self, state: Any) -> str:
        self._commands = sorted(state.admissible_commands or ())
        listed = "\n".join(f"{number} {command}" for number, command in enumerate(self._commands, 1))
        text = re.sub(r"\n\s*\n[\s>]*(-=.*)?", "\n", state.feedback).strip()  # without the status line
        return _matches(self._shown, f"{text}\n{listed}")

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


@functools.cache
def _games_folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of compiled games; deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ostinato-textworld-")


@functools.cache
def _compile_game(textworld: Any, size: tuple[int, int, int], seed: int) -> str:
    """The path of a compiled game."""
    chosen = textworld.GameOptions()
    chosen.nb_rooms, chosen.nb_objects, chosen.quest_length = size
    name = "-".join(map(str, (*size, seed)))
    chosen.seeds, chosen.path = seed, str(Path(_games_folder().name) / f"{name}.z8")
    return textworld.make(chosen)[0]
