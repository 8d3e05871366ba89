"""An agent of pydantic-ai, as it is: its own tool loop is one row of tokens, and an episode repeats.

Skipped without the package: pip install "pydantic-ai-slim[openai]".
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("pydantic_ai")
from episodes import World, turns_of

from ostinato.apps.serve.agent_server import AgentServer
from ostinato.env.custom import make_seed_prompts
from ostinato.env.games import PriceList
from ostinato.launch.policy import load_policy

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
pydantic_agent: Any = import_module("pydantic_agent")


def test_the_tool_loop_of_a_framework_is_one_row_of_tokens_and_repeats() -> None:
    policy: Any = load_policy("asset:seed-moe", "model.dtype=float32")
    server = AgentServer(policy.renderer, calls="equals")
    try:
        played = 0
        for prompt in make_seed_prompts(PriceList, "g", "train", 0, 2):
            worlds = [World(policy, server) for _ in range(2)]
            groups = [one.play(one.agent(pydantic_agent.agent), prompt, 8, ("=",)) for one in worlds]
            assert turns_of(groups[0]) == turns_of(groups[1])
            assert {t.env_reward for t in groups[0].trajectories} <= {0.0, 0.3}
            assert all(len(t.rows) == 1 for t in groups[0].trajectories)
            played += sum(len(t.turns) - 1 for t in groups[0].trajectories)
        assert played  # lookups, by chance: it has not learned to
    finally:
        server.close()
