"""The tables of issue 19's claims from kept runs, with intervals over seeds; a plot of proxy and gold.

    python -m lab.product.claims --runs DIR --planted DIR --quiet FILE --json FILE --plot FILE

runs     lab.product.experiment, versus, looks: judges, RL against SFT, the static judge and the continual one
planted  lab.product.planted, looks: delays of the detectors
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from lab.product.answers import EXPLOITS, Manner
from lab.product.planted import HONEST
from lab.settings import machine
from ostinato.files import atomic_write
from ostinato.product.gates import paired
from ostinato.run import Jsonl

SPREAD = 0.1  # above its share at the start: the onset of an exploit
NOISE = 1.96  # times the standard error of one look: less than that is no loss
SHARE_OF = {Manner.QUESTION: "question", Manner.BROKEN: "invalid"}  # of the others the manner's own name


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and 95 % interval over seeds (Student)."""
    n, mean = len(values), float(np.mean(values))
    half = student.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5 if n > 1 else float("nan")
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4), "n": n}


# ---- a judge, and RL against SFT


def versus(folder: Path) -> dict[str, Any]:
    rows = list(Jsonl(folder / "versus.jsonl").rows())
    judges, policies = [row["judges"] for row in rows], [row["policies"] for row in rows]
    found: dict[str, Any] = {"seeds": len(rows)}
    for name in ("pretrained", "trained"):
        found[f"{name} both orders"] = interval([np.mean(one[name]["right"]) for one in judges])
        for what in ("single", "odds", "consistent", "ece"):
            found[f"{name} {what}"] = interval([one[name][what] for one in judges])
    for what, of in (("both orders", lambda one: np.mean(one["right"])), ("odds", lambda one: one["odds"])):
        found[f"trained less pretrained, {what}"] = interval(
            [of(one["trained"]) - of(one["pretrained"]) for one in judges]
        )
    found["seconds"] = {
        name: [round(row[f"{name}_seconds"], 1) for row in rows] for name in ("rl", "sft") if rows
    }
    return found | golds(policies)


def golds(policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """RL, SFT and the base, seed by seed on the same problems."""
    found: dict[str, Any] = {}
    for name in policies[0] if policies else ():
        found[f"gold {name}"] = interval([np.mean(one[name]["gold"]) for one in policies])
        found[f"correct {name}"] = interval([one[name]["correct"] for one in policies])
    pairs = [("rl", "sft"), ("rl", "base"), ("sft", "base")]
    pairs += [("rl", "static")] if policies and "static" in policies[0] else []
    for one, other in pairs:
        gaps = [paired(np.array(p[one]["gold"]), np.array(p[other]["gold"])) for p in policies]
        found[f"gold {one} less {other}"] = interval([gap for gap, _, _ in gaps])
        found[f"gold {one} less {other}, each seed"] = [[round(g, 3), round(e, 3)] for g, e, _ in gaps]
    return found


# ---- planted judges


def looks_of(run: Path) -> list[dict[str, Any]]:
    (file,) = run.glob("round-001/policy/*/looks.jsonl")
    return list(Jsonl(file).rows())


def planted_run(run: Path, exploit: str) -> dict[str, Any]:
    """When the exploit began to spread, when it was found, what gold had gained and lost by then."""
    looks, finding = looks_of(run), json.loads((run / "finding.json").read_text())
    name = SHARE_OF.get(Manner(exploit), exploit)
    shares = [one["shares"].get(name, 0.0) for one in looks]
    gold = [one["gold"] for one in looks]
    onset = next(
        (one["step"] for one, share in zip(looks, shares, strict=True) if share > shares[0] + SPREAD), None
    )
    alarm = finding["figures"]["steps"] if finding["verdict"] == "alarm" else None
    gain, lost = max(gold) - gold[0], max(gold) - gold[-1]
    return {
        "alarm": alarm,
        "onset": onset,
        "gain": round(gain, 3),
        "lost": round(lost, 3),
        "stderr": round(max(one["stderr"] for one in looks), 3),
        "share": [round(shares[0], 3), round(shares[-1], 3)],
        "in time": alarm is not None and lost <= max(gain / 3, NOISE * looks[-1]["stderr"]),
        "reason": finding["reasons"][:1],
    }


def planted(folder: Path) -> dict[str, Any]:
    runs: dict[str, dict[str, Any]] = {}
    quiet = []
    for run in sorted(folder.glob("*-*")):
        exploit, _, seed = run.name.rpartition("-")
        if not (run / "course.jsonl").exists():
            continue
        if exploit == HONEST:
            finding = json.loads((run / "finding.json").read_text())
            quiet.append(
                {"seed": int(seed), "steps": finding["figures"]["steps"], "reasons": finding["reasons"]}
            )
        else:
            runs.setdefault(exploit, {})[seed] = planted_run(run, exploit)
    every = [one for seeds in runs.values() for one in seeds.values()]
    steps = sum(one["steps"] for one in quiet)
    pauses = sum(bool(one["reasons"]) for one in quiet)
    return {
        "runs": {str(one): runs[one] for one in EXPLOITS if one in runs},
        "found": [sum(one["alarm"] is not None for one in every), len(every)],
        "in time": [sum(one["in time"] for one in every), len(every)],
        "delay behind the onset": [
            one["alarm"] - one["onset"] for one in every if one["alarm"] and one["onset"] is not None
        ],
        "quiet": {"steps": steps, "pauses": pauses, "runs": quiet},
    }


# ---- static against continual


def arm(run: Path) -> dict[str, Any]:
    """The course of an arm's policies one behind the other, its looks, alarms and decisions."""
    journal = list(Jsonl(run / "decisions.jsonl").rows())
    course = list(Jsonl(run / "gold.jsonl").rows())
    looks, before = [], 0
    for file in sorted(run.glob("round-*/policy/*/looks.jsonl")):
        number = int(file.parents[2].name.removeprefix("round-"))
        rows = [{**row, "round": number, "at": before + row["step"]} for row in Jsonl(file).rows()]
        looks, before = looks + rows, before + rows[-1]["step"]
    return {
        "gold by step": [round(row["gold"], 4) for row in course],
        "rounds": [row["round"] for row in course],
        "looks": [
            {key: row[key] for key in ("round", "at", "gold", "stderr", "proxy", "shares") if key in row}
            for row in looks
        ],
        "alarms": [row["finding"]["reasons"][:1] for row in journal if row["finding"]["verdict"] == "alarm"],
        "decisions": [f"round {row['before']['round']}: {row['what']}" for row in journal],
    }


def loop(folder: Path) -> dict[str, Any]:
    seeds = sorted(int(one.name.rpartition("-")[2]) for one in folder.glob("continual-*"))
    arms = {
        name: {seed: arm(folder / f"{name}-{seed}") for seed in seeds} for name in ("static", "continual")
    }
    in_the_end = [row["policies"] for row in Jsonl(folder / "versus-loop.jsonl").rows()]
    start = [arms["static"][seed]["looks"][0]["gold"] for seed in seeds]
    return {
        "seeds": seeds,
        "gold at the start": interval(start),
        "served at the end": golds(in_the_end),
        "arms": {name: {str(seed): one for seed, one in by.items()} for name, by in arms.items()},
    }


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Of every seed the gold of what is trained on (means of three steps), and what the judge prefers of it
    to the policy in office (win rate less loss rate) at the looks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, name in zip(axes, ("static", "continual"), strict=True):
        for one in found["arms"][name].values():
            gold, rounds = np.array(one["gold by step"]), np.array(one["rounds"])
            for turn in sorted(set(rounds)):
                (at,) = np.nonzero(rounds == turn)
                smooth = [gold[max(at[0], i - 1) : min(at[-1], i + 1) + 1].mean() for i in at]
                axis.plot(at + 1, smooth, color="tab:blue", alpha=0.7)
                points = [(row["at"], row.get("proxy", 0.0)) for row in one["looks"] if row["round"] == turn]
                if points:
                    axis.plot(*zip(*points, strict=True), color="tab:orange", alpha=0.7, marker=".")
        axis.set_title(f"{name} judge")
        axis.set_xlabel("policy steps")
        axis.axhline(0, color="grey", linewidth=0.5)
    axes[0].plot([], color="tab:orange", label="proxy")
    axes[0].plot([], color="tab:blue", label="gold")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("runs", "planted"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--quiet", type=Path, help="rows of lab.product.quiet")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    found |= {"versus": versus(args.runs), "loop": loop(args.runs)} if args.runs else {}
    found |= {"planted": planted(args.planted)} if args.planted else {}
    if args.quiet:
        runs = list(Jsonl(args.quiet).rows())
        paused = [one for one in runs if one["step"] is not None]
        found["quiet"] = {"runs of 1,000 steps": len(runs), "with a pause": len(paused), "pauses": paused}
    if args.plot and args.runs:
        plot(found["loop"], args.plot)
    atomic_write(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
