"""Stores graded groups that not every checkpoint covers, so that a resumed run does not pay for them twice.

Randomness is addressed, so a resumed run would play the same groups again, token for token; reading them
back is the same and free. A group has the address of all that determines it: the request, the policy
version, and the stage that played it (model, sampler, task, rewards). So a run whose recipe changed any of
these plays its groups again. Prompts are not stored: they are in the stream.

A row has the process, and the step in its ledger, to which the group's cost is charged: a group is charged
once, however many processes read it back.

With workers that go on while the trainer learns, the tokens of a group may be of several policies. Its
address has the policy under which it began; it is returned only to a run that has reached the newest of these
policies.

After an interrupted step, only the missing groups are played, in a smaller batch than before. Their
tokens are the same; their log-probabilities have the same bits where the engine's kernels work row by row
(the native ones), and equal up to rounding (1e-6) where they do not (torch's).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.observe.ledger import Ledger
from ostinato.rollout.rollout import RolloutContext, RolloutRequest, RolloutResult
from ostinato.routes import routes_from_json, routes_to_json
from ostinato.run import JsonlZst
from ostinato.types import Completion, Group, Reward, Stop, Support, Trajectory, Turn

SELDOM = frozenset({"failed", "metrics", "extra"})  # of a reward: left out of a row where empty


class Spool:
    """The file ``inflight.jsonl.zst`` of a run folder: a compressed row per group; an incomplete end is
    ignored. ``ledger`` is that of this process, which has finished ``step`` and recalls no group up to it."""

    def __init__(self, path: Path, ledger: Ledger, step: int = 0) -> None:
        self.path, self._file, self._ledger = path, JsonlZst(path), ledger
        self._rows: dict[str, dict[str, Any]] = {}
        for row in self._file.rows():  # a later row of an address has the process that pays instead
            if row["step"] > step:
                self._rows[row["address"]] = {**self._rows.get(row["address"], {}), **row}

    def put(self, address: str, group: Group, last_step: int = 0) -> None:
        """Store a group for the step that requested it, and up to step ``last_step`` if that is later."""
        trajectories = [_make_trajectory_row(trajectory) for trajectory in group.trajectories]
        self._append_row(max(group.step, last_step), address, trajectories=trajectories)

    def take(
        self, address: str, ask: RolloutRequest, since: float, newest: int | None = None
    ) -> RolloutResult | None:
        """Return the group that an earlier process played under this address, with ``since`` as its times.
        None if there is none, if it was taken, or if a token of it is of a policy later than ``newest``. If
        no row of the ledger has paid for it, this process pays, and a row says so."""
        row = self._rows.pop(address, None)
        if row is None:
            return None
        group = _parse_group(row, ask)
        if newest is not None and find_newest_version(group) > newest:
            return None
        paid = self._ledger.has(tuple(row.get("paid_in", ())))
        if not paid:  # its process was killed before the step had ended
            self._append_row(row["step"], address)
        return RolloutResult(group=group, generated_at=since, graded_at=since, spooled=True, paid=paid)

    def _append_row(self, step: int, address: str, **columns: Any) -> None:
        """Append a row, which the next row of the ledger pays."""
        self._file.append({"step": step, "address": address, "paid_in": self._ledger.next_row, **columns})

    def forget(self, step: int) -> None:
        """Delete the groups up to ``step``, which the oldest checkpoint covers, from the file too."""
        self._filter_rows(lambda row: row["step"] > step)

    def reject(self, addresses: Collection[str]) -> None:
        """Delete these groups, from the file too: the trainer has refused them and would refuse them
        again."""
        self._filter_rows(lambda row: row["address"] not in addresses)

    def _filter_rows(self, predicate: Callable[[Mapping[str, Any]], bool]) -> None:
        self._file.keep(predicate)
        self._rows = {key: row for key, row in self._rows.items() if predicate(row)}


def make_address(ask: RolloutRequest, stage: RolloutContext, version: int) -> str:
    """Return a key of all that determines a played group: the request, the policy version and the stage."""
    request = f"{ask.seed} x{ask.group_size} {ask.prompt.uid} v{version}"
    return f"{request} context={stage.context_limit} stage={stage.identity} {stage.sampling}"


def find_newest_version(group: Group) -> int:
    """Return the newest version among the policies that sampled a group's tokens; -1 without tokens."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return max((int(turn.completion.versions.max(initial=-1)) for turn in turns), default=-1)


def _parse_group(row: Mapping[str, Any], ask: RolloutRequest) -> Group:
    trajectories = tuple(_parse_trajectory(item) for item in row["trajectories"])
    return Group(prompt=ask.prompt, trajectories=trajectories, step=ask.step)


def _make_trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    reward = trajectory.reward
    return {
        "turns": [
            {
                "context": _pack(t.context),
                "new_row": t.new_row,
                "in_thought": t.in_thought,
                **_make_completion_row(t.completion),
            }
            for t in trajectory.turns
        ],
        "stop": trajectory.stop,
        "seed": trajectory.seed,
        "env_reward": trajectory.env_reward,
        "ended": trajectory.ended,
        "last_reply": trajectory.last_reply,
        "reward": None
        if reward is None
        else {name: value for name, value in asdict(reward).items() if value or name not in SELDOM},
        "error": trajectory.error,
    }


def _parse_trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        turns=tuple(_parse_turn(item) for item in row["turns"]),
        stop=Stop(row["stop"]),
        seed=tuple(row["seed"]),
        reward=None if row["reward"] is None else Reward(**row["reward"]),
        env_reward=row.get("env_reward"),
        ended=row.get("ended", ""),
        last_reply=row.get("last_reply", ""),
        error=row["error"],
    )


def _parse_turn(row: Mapping[str, Any]) -> Turn:
    values = {name: _unpack(value) for name, value in row.items()}
    turn = {name: values.pop(name) for name in ("context", "new_row", "in_thought") if name in values}
    values["stop"] = Stop(values["stop"])
    return Turn(completion=Completion(**values), **turn)


def _make_completion_row(completion: Completion) -> dict[str, Any]:
    row = {field.name: _pack(getattr(completion, field.name)) for field in fields(completion)}
    routes = {"experts": completion.experts, "prompt_experts": completion.prompt_experts}
    return row | {name: routes_to_json(array) for name, array in routes.items() if array is not None}


def _pack(value: Any) -> Any:
    """Convert arrays to bytes in JSON: exact, and a hundred times faster than digits."""
    if isinstance(value, Support):
        return {"counts": _pack(value.counts), "ids": _pack(value.ids)}
    if not isinstance(value, np.ndarray):
        return value
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": str(value.dtype), "shape": value.shape, "base64": data}


def _unpack(value: Any) -> Any:
    """Convert back what ``_pack`` and ``routes_to_json`` made; other values stay."""
    if not isinstance(value, dict):
        return value
    if "routes" in value:
        return routes_from_json(value)
    if "counts" in value:
        return Support(**{name: _unpack(array) for name, array in value.items()})
    flat = np.frombuffer(base64.b64decode(value["base64"]), value["dtype"])
    return flat.reshape(value["shape"])
