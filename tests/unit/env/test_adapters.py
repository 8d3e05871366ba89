"""Games of other packages, where they are installed: the same seed plays the same game."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.env.adapters import Gem, TextArena, TextWorld
from ostinato.env.custom import factory

BOXED = {"id": "game:GuessTheNumber-v0-easy", "action": "\\boxed{{{number}}}"}
GAMES: list[tuple[str, Any, dict[str, Any]]] = [
    ("gem", Gem, BOXED),
    ("textarena", TextArena, {"id": "GuessTheNumber-v0", "action": "[{number}]"}),
    ("textworld", TextWorld, {"rooms": 1, "objects": 2, "quest": 1}),
]


@pytest.mark.parametrize(("package", "game", "params"), GAMES, ids=[name for name, *_ in GAMES])
def test_a_seed_is_a_game(package: str, game: Any, params: dict[str, Any]) -> None:
    pytest.importorskip(package)

    def played(seed: int) -> list[Any]:
        env = game(**params)
        heard: list[Any] = [env.reset(seed=seed, options={})[0]]
        for answer in ("#### 2", "10", "it is 3"):
            text, reward, ended, cut, _ = env.step(answer)
            heard.append((text, reward, ended, cut))
            if ended:
                break
        getattr(env, "close", lambda: None)()
        return heard

    first = played(3)
    assert first == played(3) and first[0] and len(first) > 1
    assert any(played(seed) != first for seed in range(4, 16))


def test_a_package_that_is_missing_is_named() -> None:
    for package, game, params in GAMES:
        try:
            __import__(package)
        except ModuleNotFoundError:
            with pytest.raises(ValueError, match=f"install it: pip install {package}"):
                factory(f"ostinato.env.adapters:{game.__name__}", params)
