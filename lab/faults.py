"""``ostinato bench faults``: real runs, hurt at random moments, and what became of each.

    a run      ``ostinato train`` on the packaged model, a child process, with workers over a Ray of its own
    a fault    a signal to one of its processes, a full disk, or a planted defect (``faults_planted``)
    recovered  it reached its end by itself: a sampler was replaced, or the run was lost and begun again
    stopped    it ended with a sentence that names the fault; ``ostinato resume`` then reached the end
    neither    anything else, or either of them later than the bound

Seconds count from the fault until a step was finished that counts it, or until the run had ended. A prompt is
lost when the accounts or the trajectories of the finished run lack it. In every other run rollouts overlap
with training (staleness 1); the others are lockstep, and equal an undisturbed run in one process bit for
bit, but for faults that take a group away. A run during which the bench itself was stopped is done again.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from re import search
from typing import Any

from rich.table import Table

from lab import faults_planted
from lab import faults_vllm as vllm
from lab.contender import ContenderFailed
from lab.faults_child import Child, Heartbeat, Stopped, child
from lab.faults_planted import PLAN
from lab.faults_strike import Strike, Struck, ballast, fill, kill, kill_process, pause, planted, small_disk
from lab.harness import Bench, Result, Say, columns, option
from lab.same_run import same
from ostinato.run import RunFolder

STEPS, PROMPTS, GROUP = 6, 4, 4
RUN_S = 600.0  # for a run, or a resumed one, to end: a limit that says "it hangs"
TRIES = 8  # at a run whose end came before the fault
REWARD = f"{faults_planted.__file__}:graded"
RAYS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # Ray's own: without a head they end by themselves
OURS = ("workers/", "queue/", "pipeline/", "publish/")  # columns that only a cluster has
RECIPE = (
    "quickstart",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=1",
    "trainer.tokens_per_microbatch=512",
    "model.dtype=float32",
    "model.fp32_head=false",
    "adapter.rank=4",
    "task.n_train=48",
    f"reward.functions=['{REWARD}']",
    "reward.timeout_s=5",
    "reward.isolation=off",  # it writes down what it did
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.group_size={GROUP}",
    "rollout.max_tokens=24",
    "eval.n=2",
    "eval.at_start=false",
    "eval.every=0",
    "forecast.enabled=false",
    "engine.threads=1",
    "engine.kv_memory_mb=64",
    "log.trajectories_every=1",
    "log.mismatch_every=0",
)
OVERLAP = ("pipeline.overlap=true", "pipeline.staleness=1")
TWO = ("cluster.samplers=2",)
TRAINER = ("cluster.samplers=1", "cluster.remote_trainer=true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``plan`` plants it, ``named`` is a pattern of the sentence that it may end a run with ("": no such)."""

    name: str
    how: str
    strike: Strike
    bound_s: float
    overrides: tuple[str, ...] = ()
    other: tuple[str, ...] = ()  # beside them, in every second run that overlaps or not
    named: str = ""
    plan: Callable[[Random], Mapping[str, Any]] = lambda random: {}
    restarts: int = 0  # of ``ostinato train --restarts``: what is lost is begun again without a hand
    takes_groups: bool = False  # they are dropped by a rule that is counted
    disk: bool = False
    alone: threading.Lock | None = None  # held by each of its runs


FAULTS = (
    Fault(
        name="sampler",
        how="`kill -9` of one of two samplers",
        strike=kill("sampler-0", "sampler-1", workers=2),
        bound_s=60.0,
        overrides=TWO,
    ),
    Fault(
        name="trainer",
        how="`kill -9` of the trainer's worker",
        strike=kill("trainer", workers=2),
        bound_s=60.0,
        overrides=TRAINER,
        restarts=2,
    ),
    Fault(
        name="grader",
        how="a reward function that hangs, in Python or in C",
        strike=planted("faults/timeout"),
        bound_s=60.0,
        overrides=("cluster.samplers=1", "cluster.graders=1"),
        plan=lambda random: {
            "kind": "hang",
            "call": random.randint(1, STEPS * PROMPTS),
            "in_c": random.random() < 0.5,
        },
        takes_groups=True,
    ),
    Fault(
        name="head",
        how="`kill -9` of Ray's head (`gcs_server`)",
        strike=kill_process("gcs_server", workers=2),
        bound_s=60.0,
        overrides=TRAINER,
        restarts=2,
        named="the head of the Ray cluster|its daemon on this host was lost",
        plan=lambda random: {"verdict_s": 2.0},  # a short run would end before the next call of the head
    ),
    Fault(
        name="pause",
        how="a sampler is silent for 30 s (`SIGSTOP`), with `silence_s` 5 or 60",
        strike=pause("sampler-0", "sampler-1", workers=2),
        bound_s=90.0,
        overrides=TWO,
        other=("cluster.silence_s=5",),
    ),
    Fault(
        name="disk",
        how="the run's file system (24 MB) is filled up",
        strike=fill(workers=1),
        bound_s=60.0,
        overrides=("cluster.samplers=1",),
        named="No space left on device|File too large",
        disk=True,
    ),
    Fault(
        name="nan",
        how="the trainer's adapter gets a NaN after a step",
        strike=planted(),
        bound_s=60.0,
        overrides=TRAINER,
        named="is not finite",
        plan=lambda random: {"kind": "nan", "step": random.randint(1, STEPS)},
    ),
)


VLLM, NETWORK = "vllm", "network"
NAMES = (*(fault.name for fault in FAULTS), VLLM, NETWORK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults(Bench):
    """``vllm``: a Python that has it; without one, what needs it is left out."""

    faults: tuple[str, ...] = option(NAMES, "Some of them, with commas.", "only")
    vllm: str = option("", "A python that has vLLM, for the faults of it.")
    runs: int = option(20, "Of each fault.")
    at_once: int = option(2, "Runs at once.")
    kept: Path | None = option(
        None, "A file with a line for each run; what it has is not run again."
    )  # a line for every run; what it has is not run again

    def __post_init__(self) -> None:
        if odd := sorted(set(self.faults) - set(NAMES)):
            raise ValueError(f"--only has {odd[0]!r}; use some of {', '.join(NAMES)}")

    def quick(self) -> Faults:
        return replace(self, runs=1)

    def measure(self, say: Say) -> dict[str, Any]:
        heartbeat, lock = Heartbeat(), threading.Lock()
        rows = list(_kept(self.kept))
        known = {(row["fault"], row["run"]) for row in rows}
        missing = {name for name in self.faults if any((name, n) not in known for n in range(self.runs))}
        with contextlib.ExitStack() as held:
            root = held.enter_context(tempfile.TemporaryDirectory(prefix="ostinato-bench-"))
            wanted = [*faults(replace(self, faults=tuple(missing)), held, Path(root))]
            todo = [(fault, n) for n in range(self.runs) for fault in wanted if (fault.name, n) not in known]
            reference = undisturbed(Path(root) / "undisturbed", heartbeat) if todo else {}

            def hurt_one(fault: Fault, number: int) -> None:
                row = hurt(fault, number, Path(root), heartbeat, reference)
                with lock:
                    rows.append(row)
                    if self.kept is not None:
                        with self.kept.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                    say(f"{len(rows)}/{len(known) + len(todo)}  {_line(row)}")

            with ThreadPoolExecutor(self.at_once) as threads:
                for waiting in [threads.submit(hurt_one, *one) for one in todo]:
                    waiting.result()
        mine = [row for row in rows if row["fault"] in self.faults and row["run"] < self.runs]
        return {"faults": summed(mine), "runs": mine, "settings": asdict(self)}

    @staticmethod
    def table(result: Result) -> Table:
        rows = []
        for row in result["faults"]:
            counts = [row[name] for name in ("runs", "recovered", "stopped", "neither")]
            seconds = [f"{row[name]:.1f}" for name in ("seconds_median", "seconds_max", "bound_s")]
            equal = f"{row['equal']}/{row['compared']}" if row["compared"] else "-"
            rows.append((row["fault"], *counts, *seconds, row["prompts_lost"], row["groups_dropped"], equal))
        names = ("fault", "runs", "recovered", "stopped", "neither", "s, median", "s, most", "bound")
        title = "faults at random moments of real runs"
        return columns(title, (*names, "prompts lost", "dropped", "equal"), rows)


def faults(bench: Faults, held: contextlib.ExitStack, root: Path) -> Iterator[Fault]:
    """Those that are requested and can be had; what they need is there while ``held`` is."""
    yield from (fault for fault in FAULTS if fault.name in bench.faults)
    if bench.vllm and VLLM in bench.faults:
        yield Fault(
            name=VLLM,
            how="`kill -9` of vLLM's engine core or of its front",
            strike=vllm.crash,
            bound_s=60.0,
            named="vLLM was lost",
            overrides=vllm.own_server(bench.vllm, vllm.small_model(root / "model")),
        )
    if bench.vllm and NETWORK in bench.faults:
        model = vllm.small_model(root / "model")
        wire = held.enter_context(vllm.served(bench.vllm, model, root / "vllm.log"))
        yield Fault(
            name=NETWORK,
            how="the wire to a vLLM server carries nothing for 30 s, with `silence_s` 5 or 60",
            strike=vllm.silence(wire),
            bound_s=90.0,
            named="vLLM was lost",
            overrides=vllm.server_at(wire.address, model),
            other=("cluster.silence_s=5",),
            alone=threading.Lock(),
        )


# ---- one run


def hurt(
    fault: Fault, number: int, root: Path, heartbeat: Heartbeat, reference: Mapping[str, Any]
) -> dict[str, Any]:
    """A run that was struck, as a row. Again where it ended before, or this process was stopped meanwhile."""
    missed, last_row = 0, ""
    while missed < TRIES:
        place = root / f"{fault.name}-{number}-{time.monotonic_ns()}"
        try:
            with fault.alone or contextlib.nullcontext():
                chance = Random(f"{fault.name} {number} {missed}")
                row = _hurt(fault, chance, number, place, heartbeat, reference)
        except Stopped:
            continue
        if isinstance(row, dict):
            return row
        missed, last_row = missed + 1, row
    raise ContenderFailed(f"{TRIES} runs ended before the fault {fault.name!r} could strike; {last_row}")


def _hurt(
    fault: Fault, random: Random, number: int, place: Path, heartbeat: Heartbeat, reference: Mapping[str, Any]
) -> dict[str, Any] | str:
    logs, overlap, begun = place / "runs", bool(number % 2), time.monotonic()
    place.mkdir()
    if planned := fault.plan(random):
        (place / PLAN).write_text(json.dumps(planned))
    overrides = [*fault.overrides, *(fault.other if number % 4 < 2 else ()), *(OVERLAP if overlap else ())]
    inside = planned.get("kind") == "nan"  # in the workers
    command = ["train", *(["--restarts", str(fault.restarts)] if fault.restarts else [])]
    module, command = ("lab.planted_workers", []) if inside else ("ostinato", command)
    with small_disk(logs, fault.disk):
        arguments = [*command, *RECIPE, *overrides, f"log.dir={logs}"]
        with child(arguments, place, logs, heartbeat, module) as hit:
            struck = fault.strike(hit, random, STEPS)
            if struck is None:
                return f"the last one printed {hit.sentence()!r}"
            others = hit.processes("")
            hit.until(lambda: False, RUN_S)
            seconds = went_on(hit, struck) - struck.at
            code, sentence = hit.process.poll(), hit.sentence()
            left = [name for name in hit.leave(others) if not name.startswith(RAYS)]
        ballast(logs).unlink(missing_ok=True)
        (place / PLAN).unlink(missing_ok=True)
        resumed = None if code == 0 or hit.folder is None else resume(hit.folder, place, logs, heartbeat)
        row: dict[str, Any] = {
            "fault": fault.name,
            "run": number,
            "injected": fault.how,
            "how": struck.how,
            "overlap": overlap,
            "code": code,
            "sentence": "" if code == 0 else sentence,
            "seconds": seconds,
            "bound_s": fault.bound_s,
            "left_behind": left,
            "restarts": len([*RunFolder(hit.folder).restarts.rows()]) if hit.folder else 0,
            "resumed": resumed,
            "wall_s": time.monotonic() - begun,
        }
        row["outcome"] = outcome(fault, row)
        if hit.folder is None:
            return row
        return row | after(fault, RunFolder.open(hit.folder), overlap, reference)


def resume(folder: Path, place: Path, logs: Path, heartbeat: Heartbeat) -> int | str:
    """Exit code of ``ostinato resume``; its last words where that is not 0."""
    with child(["resume", str(folder)], place, logs, heartbeat) as again:
        again.until(lambda: False, RUN_S)
        code = again.process.poll()
        return 0 if code == 0 else f"{code}: {again.sentence()}"


def went_on(hit: Child, struck: Struck) -> float:
    """When a step that counts the fault was finished; otherwise when the run had ended."""
    signs = [hit.seen[row["step"]] for row in hit.rows() if row["step"] in hit.seen and struck.sign(row)]
    return min([time.time(), *(at for at in signs if at >= struck.at)])


def outcome(fault: Fault, row: Mapping[str, Any]) -> str:
    """What a row says of a run: recovered, stopped or neither."""
    if row["code"] is None or row["seconds"] > fault.bound_s:  # it hung, or took too long
        return "neither"
    if row["code"] == 0:
        return "recovered"
    named = bool(fault.named) and row["sentence"].startswith("ostinato: ")
    if named and search(fault.named, row["sentence"]) and row["resumed"] == 0:
        return "stopped"
    return "neither"


# ---- what came of it


def after(fault: Fault, folder: RunFolder, overlap: bool, reference: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts lost, groups dropped, and whether it equals the undisturbed run (None: it need not)."""
    exact = not (overlap or fault.takes_groups or fault.name in (VLLM, NETWORK))  # vLLM has noise of its own
    by_rule, differs = dropped(folder), differences(summary_of(folder), reference) if exact else []
    return {
        "lost": lost(folder),
        "dropped": sum(by_rule.values()),
        "dropped_by": by_rule,
        "equal": not differs if exact else None,
        "differs": differs,
    }


def lost(folder: RunFolder) -> int:
    """Prompts that the finished run lacks or has twice: in its accounts, or by what was sampled of them."""
    rows = list(folder.metrics.rows())
    last = rows[-1] if rows else {}
    here = (
        sum(dropped(folder).values())
        + last.get("groups/trained_total", 0)
        + last.get("groups/outstanding", 0)
    )
    samples = Counter((row["seed"][2], row["sample"]) for row in folder.trajectories.rows())
    whole = {place for place, sample in samples if all(samples[place, n] == 1 for n in range(GROUP))}
    return max(
        abs(STEPS * PROMPTS - len(whole)),
        abs(int(STEPS * PROMPTS - last.get("groups/admitted_total", 0))),
        abs(int(last.get("groups/admitted_total", 0) - here)),
    )


def dropped(folder: RunFolder) -> dict[str, int]:
    """Groups by rule, over the whole run."""
    rows, prefix = list(folder.metrics.rows()), "groups/dropped_total/"
    last = rows[-1] if rows else {}
    return {name.removeprefix(prefix): int(n) for name, n in last.items() if name.startswith(prefix)}


def summary_of(folder: RunFolder) -> dict[str, Any]:
    """All of a run that a fault may not change: tokens, figures, scores, weights."""
    rows = [{k: v for k, v in row.items() if not k.startswith(OURS)} for row in folder.metrics.rows()]
    adapter = folder.adapter / "adapter_model.safetensors"
    return {
        "trajectories": [*folder.trajectories.rows()],
        "metrics": same(rows),
        "eval": same(folder.eval.rows()),
        "adapter": adapter.read_bytes() if adapter.exists() else b"",
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What of two runs is not the same: a part, or the columns of its rows."""
    found = []
    for part in (part for part in other if one[part] != other[part]):
        if part == "adapter" or len(one[part]) != len(other[part]):
            found.append(part)
            continue
        pairs = zip(one[part], other[part], strict=True)
        names = sorted({k for a, b in pairs for k in a.keys() | b.keys() if a.get(k) != b.get(k)})
        found += [f"{part}: {name}" for name in names]
    return found


def undisturbed(place: Path, heartbeat: Heartbeat, recipe: Sequence[str] = RECIPE) -> dict[str, Any]:
    """The run in one process that nothing happens to."""
    logs = place / "runs"
    logs.mkdir(parents=True)
    with child(["train", *recipe, f"log.dir={logs}"], place, logs, heartbeat) as run:
        while True:
            try:
                run.until(lambda: False, RUN_S)
                break
            except Stopped:  # it has lost nothing
                run.forgive()
        if run.process.poll() != 0 or run.folder is None:
            raise ContenderFailed(f"the undisturbed run failed: {run.sentence()}")
        return summary_of(RunFolder.open(run.folder))


# ---- the table


def summed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each fault."""
    return [_summed(name, of) for name in NAMES if (of := [row for row in rows if row["fault"] == name])]


def _summed(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    outcomes = Counter(row["outcome"] for row in rows)
    seconds, exact = (
        [row["seconds"] for row in rows],
        [r["equal"] for r in rows if r.get("equal") is not None],
    )
    return {
        "fault": name,
        "injected": rows[0]["injected"],
        "runs": len(rows),
        **{name: outcomes[name] for name in ("recovered", "stopped", "neither")},
        "seconds_median": statistics.median(seconds),
        "seconds_max": max(seconds),
        "bound_s": rows[0]["bound_s"],
        "prompts_lost": sum(row.get("lost", STEPS * PROMPTS) for row in rows),
        "groups_dropped": sum(row.get("dropped", 0) for row in rows),
        "equal": sum(exact),
        "compared": len(exact),
        "left_behind": sum(len(row["left_behind"]) for row in rows),
    }


def _line(row: Mapping[str, Any]) -> str:
    equal = {True: ", equal", False: f", DIFFERS in {row.get('differs')}", None: ""}[row.get("equal")]
    accounts = f"{row.get('lost', '?')} lost, {row.get('dropped', '?')} dropped{equal}"
    sentence = f": {row['sentence'][:150]}" if row["sentence"] else ""
    what = f"{row['fault']} {row['run']} ({row['how']}): {row['outcome']} after {row['seconds']:.1f} s"
    return f"{what}, {accounts}{sentence}"


def _kept(path: Path | None) -> Iterator[dict[str, Any]]:
    if path is not None and path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())
