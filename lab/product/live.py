"""The simulated product at work: it answers its users with what is served, and stores what they do.

One ``wait`` of the loop is one batch of sessions, ``hours_a_batch`` of the world's time. Two answers
that differ in their features are shown side by side, of two others one. What is really wanted (gold) is
written down for the experiment alone.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.product.answers import action_of, features
from lab.product.corpora import question_of
from lab.product.users import EPOCH, World, choose, gold, no_habits, react, user_name
from ostinato.env.arithmetic import rows
from ostinato.files import atomic_write
from ostinato.launch.engine import new_engine
from ostinato.launch.policy import load_policy
from ostinato.model.peft_io import load_peft
from ostinato.product.events import Event, Exchange
from ostinato.product.loop import Position, canary_arm
from ostinato.product.store import Store
from ostinato.run import Jsonl
from ostinato.types import Completion, Prompt, Request, Sampling

HOUR = 3600.0
LAST_BATCH = 400  # of a world: what takes longer has hung


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How much there is of it."""

    sessions: int = 128  # of a batch
    hours_a_batch: float = 36.0
    max_tokens: int = 64


class Standing:
    """A ``Live`` product that stands still on the first day."""

    def now(self) -> float:
        return EPOCH

    def wait(self, at: Position) -> bool:
        return False


class Simulated:
    """A ``Live`` product. ``folder``: of the loop, whose serving.json says who answers."""

    def __init__(self, world: World, traffic: Traffic, store: Store, folder: Path, model: str) -> None:
        self._world, self._traffic, self._store, self._folder = world, traffic, store, folder
        policy = load_policy(model)
        self._decoder, self._renderer = policy.decoder, policy.renderer
        self._engine = new_engine(policy.recipe, policy.decoder, policy.renderer)
        self._published = {""}  # the model itself is the engine's first
        self._state = folder / "world.npz"
        self._batch, self._habits = self._restored()
        self.truth = Jsonl(folder / "truth.jsonl")  # what only the simulator knows

    def now(self) -> float:
        return EPOCH + self._batch * self._traffic.hours_a_batch * HOUR

    def wait(self, at: Position) -> bool:
        """One batch of sessions."""
        if self._batch >= LAST_BATCH:
            return False
        serving = json.loads((self._folder / "serving.json").read_text())
        exchanges = self._exchanges(serving)
        events: list[Event] = []
        for one, other in zip(exchanges[::2], exchanges[1::2], strict=True):
            if self._differ(one, other):
                new, self._habits = choose(self._world, one, other, self._habits)
            else:
                new, self._habits = react(self._world, one, self._habits)
            events += new
        shown = {event.response_id for event in events}
        kept = [one for one in exchanges if one.response_id in shown]
        self._store.write(events, kept)
        self._write_truth(at, kept)
        self._batch += 1
        kept = io.BytesIO()
        np.savez(kept, batch=self._batch, habits=self._habits)
        atomic_write(self._state, kept.getvalue())
        return True

    def _differ(self, one: Exchange, other: Exchange) -> bool:
        """Whether two answers are of different kinds: then they are shown side by side."""
        question = str(one.messages[0]["content"])
        return features(question, one.output) != features(question, other.output)

    def _restored(self) -> tuple[int, np.ndarray]:
        """(batches so far, habits), of a world that was interrupted or copied."""
        if not self._state.exists():
            return 0, no_habits(self._world)
        with np.load(self._state) as kept:
            return int(kept["batch"]), kept["habits"]

    def _exchanges(self, serving: Mapping[str, Any]) -> list[Exchange]:
        """Two answers to the prompt of each session, both of the policy that serves its user."""
        traffic, start = self._traffic, self.now()
        prompts = rows("train", 10_000 + 1000 * self._world.seed + self._batch, traffic.sessions)
        rng = random.Random(f"{self._world.seed}/sessions/{self._batch}")
        sessions = []
        for number, prompt in enumerate(prompts):
            user = user_name(rng.randrange(self._world.users))
            arm, propensity, served = "control", 1.0, serving["policy"]
            if canary := serving.get("canary"):
                arm, propensity = canary_arm(user, serving["round"], canary["share"])
                served = canary if arm == "canary" else served
            sessions.append((prompt, user, arm, propensity, served, start + number / traffic.sessions * HOUR))
        answers = asyncio.run(self._sampled([(one[0], one[4]) for one in sessions]))
        found = []
        for number, (prompt, user, arm, propensity, served, ts) in enumerate(sessions):
            for k, (tokens, done) in enumerate(answers[number]):
                found.append(
                    Exchange(
                        response_id=f"b{self._batch}-{number}-{k}",
                        ts=ts,
                        model="seed-moe",
                        revision=served["revision"],
                        messages=({"role": "user", "content": question_of(prompt)},),
                        output=done.text,
                        action=action_of(done.text),
                        prompt_tokens=tokens,
                        tokens=done.tokens,
                        logprobs=done.logprobs,
                        user=user,
                        arm=arm,
                        propensity=propensity,
                    )
                )
        return found

    async def _sampled(
        self, batch: list[tuple[Prompt, Mapping[str, Any]]]
    ) -> list[list[tuple[np.ndarray, Completion]]]:
        sampling = Sampling(max_tokens=self._traffic.max_tokens, stop_tokens=self._renderer.stop_tokens)
        requests = [
            Request(
                tokens=self._renderer.prompt(prompt),
                sampling=sampling,
                seed=(self._world.seed, self._batch, number, k),
                policy=self._policy(served),
            )
            for number, (prompt, served) in enumerate(batch)
            for k in range(2)
        ]
        done = {index: one async for index, one in self._engine.generate(requests)}
        both = [(request.tokens, done[index]) for index, request in enumerate(requests)]
        return [both[at : at + 2] for at in range(0, len(both), 2)]

    def _policy(self, served: Mapping[str, Any]) -> str:
        """The engine's name of an adapter, which is published when it is first served."""
        name = str(served["revision"])
        if name not in self._published:
            self._engine.publish(load_peft(Path(served["adapter"]), self._decoder), 0, name)
            self._published.add(name)
        return name

    def _write_truth(self, at: Position, shown: list[Exchange]) -> None:
        found = [features(str(one.messages[0]["content"]), one.output) for one in shown]
        golds = [gold(self._world, one, exchange.ts) for one, exchange in zip(found, shown, strict=True)]
        names = [name for one in found for name in one.named()] + [one.action.value for one in found]
        shares = {name: names.count(name) / len(found) for name in sorted(set(names))}
        row = {
            "batch": self._batch,
            "ts": self.now(),
            "round": at.round,
            "stage": at.stage,
            "gold": np.mean(golds),
        }
        row |= {"correct": np.mean([one.correct for one in found]), "shares": shares}
        self.truth.append(row)


__all__ = ["Simulated", "Standing", "Traffic"]
