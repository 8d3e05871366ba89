"""A judge that is trained once against one that learns on, over a drift and planted exploits.

    python -m lab.product.experiment FOLDER --model BASE/adapter --rounds 4

Both arms have the same users, first window, first judge and policy steps. ``static``: the judge of the first
round stays; no detector, gate or canary stops its policy. ``continual``: the loop as `ostinato product run`
works it. Every answer that was trained on is scored by the truth: gold.jsonl, one row a policy step.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.product.answers import features
from lab.product.live import Simulated, Traffic
from lab.product.users import World, gold
from ostinato.files import atomic_write
from ostinato.launch.product.loop import ProductLoop, Work
from ostinato.launch.product.settings import ProductSettings, read_settings
from ostinato.launch.product.stages import STAGES
from ostinato.product.loop import Finding, Position, Stage
from ostinato.product.store import open_store
from ostinato.run import Jsonl, RunFolder, atomic_folder

HERE = Path(__file__).parent
PANEL = '''"""Gold as a panel sees it: the taste of {judges} users, with noise."""
import random
from pathlib import Path

from lab.product.answers import features
from lab.product.users import World, utility

WORLD = World(seed={seed})


def panel(prompts, completions, **columns):
    now = float(Path({clock!r}).read_text())
    scores = []
    for prompt, completion in zip(prompts, completions):
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        rng = random.Random(f"{{WORLD.seed}}/panel/{{now}}/{{question}}/{{text}}")
        users = [rng.randrange(WORLD.users) for _ in range({judges})]
        found = features(question, text)
        felt = [utility(WORLD, found, user, now) + rng.gauss(0, WORLD.noise) for user in users]
        scores.append(sum(felt) / len(felt))
    return scores
'''


# ---- the arm without any correction


def _same_judge(loop: ProductLoop, at: Position) -> Finding:
    return STAGES[Stage.JUDGE](loop, at) if not at.judge else Finding(revision=at.judge)


def _pass(loop: ProductLoop, at: Position) -> Finding:
    return Finding()


def _waited(loop: ProductLoop, at: Position) -> Finding:
    """As long as the canary takes, whatever it says."""
    return Finding(figures=STAGES[Stage.CANARY](loop, at).figures)


WORK: Mapping[str, Mapping[Stage, Work]] = {
    "continual": STAGES,
    "static": {
        **STAGES,
        Stage.JUDGE: _same_judge,
        Stage.JUDGE_GATES: _pass,
        Stage.SHADOW: _pass,
        Stage.POLICY_GATES: _pass,
        Stage.CANARY: _waited,
    },
}


# ---- one run


class Clocked(Simulated):
    """Writes the world's time where the panel reads it."""

    clock: Path

    def wait(self, at: Position) -> bool:
        more = super().wait(at)
        self.clock.write_text(str(self.now()))
        return more


def settings_of(folder: Path, arm: str, seed: int, model: Path, overrides: Sequence[str]) -> ProductSettings:
    """product.toml of an arm, and its panel."""
    folder.mkdir(parents=True, exist_ok=True)
    clock = (folder / "clock").absolute()
    atomic_write(folder / "panel.py", PANEL.format(judges=3, seed=seed, clock=str(clock)))
    text = (HERE / "product.toml").read_text()
    atomic_write(folder / "product.toml", text)
    given = [f"model={model}", f"store={folder / 'feedback.sqlite'}", f"seed={seed}"]
    given += [f"gold={folder.absolute() / 'panel.py'}:panel"]
    given += ["policy.stop_on_alarm=false", "policy.look_every=8"] if arm == "static" else []
    return read_settings(folder / "product.toml", *given, *overrides)


def opened(folder: Path, arm: str, seed: int, model: Path, overrides: Sequence[str]) -> ProductLoop:
    """The loop of an arm where it stands; its store is open until the process ends."""
    settings = settings_of(folder, arm, seed, model, overrides)
    store = open_store(settings.store)
    live = Clocked(World(seed=seed), Traffic(), store, folder, str(model))
    live.clock = folder / "clock"
    live.clock.write_text(str(live.now()))
    return ProductLoop(settings, folder, store, live, WORK[arm])


def begin(folder: Path, seed: int, model: Path, overrides: Sequence[str]) -> Path:
    """The first window and the first judge of a seed, which all its arms share."""
    first = folder / f"first-{seed}"
    loop = opened(first, "static", seed, model, overrides)
    while loop.at.stage in (Stage.COLLECT, Stage.FREEZE, Stage.JUDGE):
        loop.step()
    return first


def run(folder: Path, arm: str, seed: int, rounds: int, model: Path, overrides: Sequence[str]) -> None:
    own = folder / f"{arm}-{seed}"
    if not own.exists():
        with atomic_folder(own) as temporary:
            shutil.copytree(begin(folder, seed, model, overrides), temporary, dirs_exist_ok=True)
    opened(own, arm, seed, model, overrides).run(rounds)
    score(own, World(seed=seed))


def score(folder: Path, world: World) -> None:
    """gold.jsonl: the course of every policy that was trained, one behind the other."""
    rows, before = [], 0
    times = {row["after"]["round"]: row["ts"] for row in Jsonl(folder / "decisions.jsonl").rows()}
    for part in sorted(folder.glob("round-*/policy/*/recipe.toml")):
        number = int(part.parents[2].name.removeprefix("round-"))
        found = course(part.parent, world, times[number])
        rows += [row | {"round": number, "step": before + row["step"]} for row in found]
        before += max((row["step"] for row in found), default=0)
    atomic_write(folder / "gold.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def course(run: Path, world: World, ts: float) -> list[dict[str, Any]]:
    """Of every step of a run the true gold of its answers at ``ts``, and the shares of features."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in RunFolder.open(run).trajectories.rows():
        steps.setdefault(row["step"], []).append(row)
    rows = []
    for step, answers in sorted(steps.items()):
        found = [features(one["prompt"][-1]["content"], one["turns"][-1]["text"]) for one in answers]
        names = [name for one in found for name in (*one.named(), one.action.value)]
        rows.append(
            {
                "step": step,
                "ts": ts,
                "gold": float(np.mean([gold(world, one, ts) for one in found])),
                "correct": float(np.mean([one.correct for one in found])),
                "shares": {name: names.count(name) / len(found) for name in sorted(set(names))},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the model that base.toml has made")
    parser.add_argument("--arm", action="append", choices=list(WORK))
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("overrides", nargs="*", help="of product.toml")
    args = parser.parse_intermixed_args()
    for seed in args.seed or range(5):
        for arm in args.arm or list(WORK):
            run(args.folder, arm, seed, args.rounds, args.model, args.overrides)


if __name__ == "__main__":
    main()
