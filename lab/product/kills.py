"""The loop of a product under random kills: is anything lost, counted twice, or promoted without its gates?

    python -m lab.product.kills FOLDER --model BASE/adapter --kills 200 --seed 0

Of each store a product of its own: `ostinato serve --feedback --product`, `ostinato product run` and clients
(``clients``), all as processes. One of them gets SIGKILL at a random moment, or at a random opening, renaming
or making of a file of the loop, and is started again at once; of PostgreSQL a backend, or all of it. Behind
the kills the clients send what is left, and ``audit`` compares logs, store and folder.

Commands are forked from this process, which has imported the program: a start costs no second of imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ostinato.launch.product.stages
import ostinato.launch.served
import ostinato.serve.app  # noqa: F401  what a start would import
from lab.product.audit import audit
from lab.product.clients import Crowd, Unanswered
from lab.product.postgres import Cluster, cluster
from lab.settings import machine
from ostinato.cli.app import main as ostinato_main
from ostinato.files import atomic_write
from ostinato.launch.product.settings import read_settings
from ostinato.product.loop import Position, Stage, position_of
from ostinato.product.rewards import read_table
from ostinato.run import Jsonl

HERE = Path(__file__).parent
REWARDS = HERE.parents[1] / "recipes" / "product" / "rewards.toml"
GOLD = '''"""What is really wanted: utility on the last day of the world's drift."""
import time

from lab.product.answers import features
from lab.product.users import World, gold


def panel(prompts, completions, **columns):
    scores = []
    for prompt, completion in zip(prompts, completions):
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        scores.append(gold(World(), features(question, text), time.time()))
    return scores
'''
JUDGE_STAGES = (Stage.JUDGE, Stage.JUDGE_GATES, Stage.SHADOW)
TRAINER_STAGES = (Stage.POLICY, Stage.POLICY_GATES, Stage.CANARY)
MOST_A_STAGE = 3  # kills of the loop within one stage of one round: it has to get on
PARTS = ("decisions.jsonl", "serving.json", "bank.jsonl", "revisions", "window", "made")  # of the loop
SETTLE_S = 900.0  # at most, behind the last kill


def forked(words: Sequence[str], log: Path, before: Callable[[], None] = lambda: None) -> int:
    """`ostinato WORDS` in a process and session of its own; its process id."""
    if child := os.fork():
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        before()
        ostinato_main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(70)


def strike_at(nth: int) -> Callable[[], None]:
    """The process kills itself at the n-th opening, renaming or making of a part of the loop's folder."""
    left = nth

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir") and any(
            part in str(one) for one in arguments[:2] for part in PARTS if isinstance(one, str | os.PathLike)
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


@dataclass(slots=True)
class Arm:
    """A product on one store, and what was done to it. ``pids``: "server" and "loop" """

    folder: Path
    store: str
    model: Path
    port: int
    rng: random.Random
    cluster: Cluster | None
    gap_s: float
    pids: dict[str, int] = field(default_factory=dict)
    struck: set[str] = field(default_factory=set)  # whom we have killed and not yet buried
    kills: list[dict[str, Any]] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)  # by themselves
    spent: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def product(self) -> Path:
        return self.folder / "product"

    def at(self) -> Position:
        return position_of(list(Jsonl(self.product / "decisions.jsonl").rows()))

    def start(self, name: str, *, armed: bool = True) -> None:
        if name == "server":
            words = ["serve", str(self.model), "--name", "seed", "--port", str(self.port)]
            words += ["--feedback", self.store, "--product", str(self.product)]
            self.pids[name] = forked([*words, "engine.threads=1"], self.folder / "server.log")
            return
        words = ["product", "run", str(self.folder / "product.toml"), "--folder", str(self.product)]
        nth = self.rng.randint(1, 14) if armed and self.spares() and self.rng.random() < 0.4 else 0
        before = strike_at(nth) if nth else lambda: None
        self.pids[name] = forked(words, self.folder / "loop.log", before)

    def spares(self) -> bool:
        """May the loop be killed where it stands?"""
        at = self.at()
        return self.spent[at.round, at.stage] < MOST_A_STAGE

    def bury(self, *, armed: bool = True) -> None:
        """Start again whoever has ended."""
        for name, pid in [*self.pids.items()]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            code, at = os.waitstatus_to_exitcode(status), self.at()
            if name in self.struck:
                self.struck.discard(name)
            elif code == -signal.SIGKILL:
                self.count("loop at a file", at)
            else:
                last = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
                self.ended.append({"who": name, "code": code, "stage": at.stage, "last": last[-1:]})
                time.sleep(1.0)
            self.start(name, armed=armed)

    def count(self, who: str, at: Position) -> None:
        self.kills.append({"who": who, "round": at.round, "stage": str(at.stage)})
        if who.startswith(("loop", "judge", "trainer")):
            self.spent[at.round, at.stage] += 1

    def kill(self) -> None:
        """One of them, by chance; none where it is the loop, which has to get on."""
        at = self.at()
        victims = {"server": 0.25, "loop": 0.55}
        if self.cluster is not None:
            victims |= {"store: a backend": 0.1, "store: all of it": 0.1}
        (who,) = self.rng.choices([*victims], [*victims.values()])
        if who == "loop" and not self.spares():
            return
        if who.startswith("store"):
            assert self.cluster is not None
            self.cluster.crash(all_of_it=who.endswith("it"), rng=self.rng)
            self.count(who, at)
            return
        self.struck.add(who)
        os.kill(self.pids[who], signal.SIGKILL)
        if who == "loop":
            who = "judge" if at.stage in JUDGE_STAGES else "trainer" if at.stage in TRAINER_STAGES else who
        self.count(who, at)

    def strike(self, kills: int) -> None:
        while len(self.kills) < kills:
            until = time.monotonic() + min(self.rng.expovariate(1 / self.gap_s), 6 * self.gap_s)
            while time.monotonic() < until:
                self.bury()
                time.sleep(0.1)
            self.kill()
            if len(self.kills) % 10 == 0:
                at, many = self.at(), Counter(one["who"] for one in self.kills)
                print(
                    f"{time.strftime('%X')} {len(self.kills)} {at.round} {at.stage} {dict(many)}", flush=True
                )

    def settle(self, seen: Callable[[], bool]) -> bool:
        """Undisturbed, until ``seen`` or for SETTLE_S; whether it was seen."""
        end = time.monotonic() + SETTLE_S
        while not (found := seen()) and time.monotonic() < end:
            self.bury(armed=False)
            time.sleep(0.2)
        return found


def written(folder: Path, model: Path, store: str) -> None:
    """product.toml of an arm with what it names."""
    rewards = REWARDS.read_text().replace("horizon_s = 600", "horizon_s = 4")
    atomic_write(folder / "rewards.toml", rewards.replace("lateness_s = 60", "lateness_s = 2"))
    atomic_write(folder / "gold.py", GOLD)
    given = {"model": model, "store": store, "rewards": folder / "rewards.toml"}
    lines = [f'gold = "{folder / "gold.py"}:panel"']
    for line in (HERE / "kills.toml").read_text().splitlines():
        key = line.partition(" = ")[0]
        lines.append(f'{key} = "{given[key]}"' if key in given else line)
    atomic_write(folder / "product.toml", "\n".join(lines))
    read_settings(folder / "product.toml")


def run(folder: Path, kind: str, model: Path, kills: int, seed: int, gap_s: float) -> dict[str, Any]:
    """One arm, from nothing to its audit."""
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        made = stack.enter_context(cluster()) if kind == "postgres" else None
        store = made.address() if made else str(folder / "feedback.sqlite")
        written(folder, model, store)
        arm = Arm(folder, store, model, port, random.Random(f"{kind}/{seed}"), made, gap_s)
        stack.callback(_end, arm.pids)
        begun = time.time()
        arm.start("server")
        arm.start("loop", armed=False)
        clients = {f"clients-{k}": _crowd(arm, seed, k) for k in range(2)}
        stack.callback(_end, clients)
        logs = [folder / f"{name}.jsonl" for name in clients]
        arm.strike(kills)
        _settled(arm, clients)
        unserved = "" if arm.settle(lambda: not _unserved(arm)) else _unserved(arm)
        for name in ("loop", "server"):
            arm.struck.add(name)
            os.kill(arm.pids[name], signal.SIGTERM)
            os.waitpid(arm.pids.pop(name), 0)
        found = audit(arm.product, store, logs, read_table(folder / "rewards.toml"))
    return {
        **{"store": kind, "seconds": time.time() - begun},
        **{"kills": len(arm.kills), "by": dict(Counter(one["who"] for one in arm.kills))},
        "by_stage": dict(Counter(one["stage"] for one in arm.kills)),
        **{
            "ended_by_themselves": arm.ended,
            "unserved": unserved,
            **found,
        },
    }


def _crowd(arm: Arm, seed: int, k: int) -> int:
    crowd = Crowd(port=arm.port, model="product", file=arm.folder / f"clients-{k}.jsonl", seed=2 * seed + k)
    if child := os.fork():
        return child
    try:
        crowd.work()
    except BaseException:
        import traceback

        (arm.folder / f"clients-{k}.log").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _settled(arm: Arm, clients: dict[str, int]) -> None:
    """Until the round has ended that the last kill met, and every client has its acknowledgements."""
    last = arm.at().round
    arm.settle(lambda: arm.at().round > last or arm.at().stage is Stage.COLLECT)
    for pid in clients.values():
        os.kill(pid, signal.SIGTERM)
    left = {*clients.values()}

    def gone() -> bool:
        for pid in [*left]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        return not left

    arm.settle(gone)
    clients.clear()
    if left:
        raise RuntimeError(f"clients {left} wait for acknowledgements {SETTLE_S:g} s behind the last kill")


def _unserved(arm: Arm) -> str:
    """Why the server does not answer with the policy in office; "" where it does. A server looks every two
    seconds for who is in office, and a canary answers a share of the requests."""
    office = arm.at().policy or f"product@{arm.at().round}"
    crowd = Crowd(port=arm.port, model="product", file=arm.folder / "none", seed=0)
    body = {"model": "product", "messages": [{"role": "user", "content": "1 + 1 = ?"}], "max_tokens": 4}
    try:
        status, reply = crowd.post("/v1/chat/completions", body)
    except Unanswered as error:
        return f"no answer: {error}"
    by = reply.get("system_fingerprint")
    return "" if by == office else f"status {status}, answered by {by}, in office is {office}"


def _end(pids: dict[str, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the model that base.toml has made")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--postgres", type=float, default=0.4, help="share of the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap-s", type=float, default=4.0, help="mean seconds between two kills")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children end with it
    before, arms = machine(), []
    on_postgres = round(args.kills * args.postgres)
    for kind, kills in (("sqlite", args.kills - on_postgres), ("postgres", on_postgres)):
        if kills:
            where = args.folder.absolute() / kind
            arms.append(run(where, kind, args.model.absolute(), kills, args.seed, args.gap_s))
            print(json.dumps(arms[-1], indent=1), flush=True)
    result = {"machine": before, "settings": {k: str(v) for k, v in vars(args).items()}, "arms": arms}
    if args.json:
        atomic_write(args.json, json.dumps(result, indent=1) + "\n")
    sys.exit(any(one["broken"] for one in arms))


if __name__ == "__main__":
    main()
