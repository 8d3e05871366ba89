"""``ostinato compare``: arms (a model, a method, a rank each) under exactly one budget, with controls.

    sweep     every learning rate of an arm to 1/8 of the budget, the better half of them on to all of it, one
              seed, by the validation half of the held-out problems (those at odd places)
    race      the best one with the other seeds, scored at log-spaced shares of the budget
    tables    by the test half (even places), and by all of ``eval.downstream``: ``scaling.gain``

Runs are jobs of ``arms.jobs``: child processes, resumed where they stopped. Runs of a seed share prompts,
their order and noise, so the learning rates of an arm change nothing in the runs of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from ostinato.apps.scaling.arms.jobs import Job, State, has_ended, load_arm_recipe, make_run_recipe
from ostinato.apps.scaling.arms.kept import make_slug, read_prompts_hash
from ostinato.apps.scaling.gain import Outcomes
from ostinato.config import Recipe, resolve_paths
from ostinato.config.explain import explain
from ostinato.config.fields import Floats, ModelName, Overrides, PathKind, Positive
from ostinato.config.sections import Section
from ostinato.every import Every
from ostinato.inputs import parse_toml
from ostinato.observe.rows import abilities_left, mean
from ostinato.run import MAIN_SET, RunFolder

RUNGS = (1 / 8, 1.0)  # of the budget: where a sweep looks at its learning rates; the first is in SHARES
SHARES = tuple(2.0**-n for n in range(6, 0, -1))  # of the budget: where a run is scored, beside both ends
Budget = tuple[float, str]  # amount and unit
LONG = 10**6  # steps: more than any budget has
CONTROLS: Mapping[str, Sequence[str]] = {
    "": (),
    "random reward": ("algo.shuffled=true",),
    "own correct": ('algo.baseline="none"', 'algo.scale="none"'),  # the run learns from right answers only
}


class ArmSpec(Section):
    """The table ``[arms.NAME]`` of an arms file."""

    model: ModelName = ""  # as model.path; empty: the recipe's
    method: str = "lora"  # or full
    rank: Positive = 16
    lrs: Floats = ()  # to choose from; empty: those of the file
    control: str = ""  # "random reward" or "own correct"
    overrides: Overrides = ()


class ArmsFile(Section):
    recipe: Annotated[str, PathKind.RECIPE] = "quickstart"
    lrs: Floats = (1e-4, 3e-4, 1e-3)
    threshold: float = 0.75  # share of the best arm's gain, to which the compute is shown
    overrides: Overrides = ()
    arms: dict[str, ArmSpec] = Field(default_factory=dict)


def read_arms(path: Path) -> ArmsFile:
    """Read an arms file; relative paths in it begin at its folder. Raises ValueError with one sentence for a
    fault, OSError for a file that cannot be read."""
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
        file = ArmsFile.model_validate(resolve_paths(tree, path.parent, ArmsFile))
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, ArmsFile, 'an arms file')}") from None
    if not file.arms:
        raise ValueError(f"{path} has no arms; add tables [arms.NAME]")
    for name, arm in file.arms.items():
        if arm.method not in ("lora", "full") or arm.control not in CONTROLS:
            raise ValueError(
                f"{path}: arm {name!r} has method {arm.method!r} and control {arm.control!r}; use lora or "
                f"full, and one of {', '.join(filter(None, CONTROLS))} or none"
            )
    return file


def parse_budget(text: str) -> Budget:
    """Parse "2e14 flops", "20000 interactions" or "600 seconds": exactly one amount and unit. Raises
    ValueError."""
    amount, _, unit = text.strip().partition(" ")
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if unit not in ("flops", "interactions", "seconds") or not 0 < value < math.inf:
        raise ValueError(
            f'--budget is {text!r}; use one of "2e14 flops", "20000 interactions", "600 seconds"'
        )
    return value, unit


def format_budget(recipe: Recipe, value: float, unit: str) -> int | str:
    """Return the ``trainer.budget`` of a recipe. Interactions (episodes) are rounded up to whole steps."""
    if unit == "interactions":
        return max(1, math.ceil(value / (recipe.rollout.prompts_per_step * recipe.rollout.group_size)))
    return f"{value:.12g} flops" if unit == "flops" else f"{value / 3600:.9g} hours"


def make_job(
    file: ArmsFile, name: str, lr: float, seed: int, budget: Budget, out: Path, until: float = 1
) -> Job:
    """Make the job of a run for the share ``until`` of the budget; a later job may go on with the run. Raises
    ValueError for an arm whose recipe is invalid."""
    arm = file.arms[name]
    keys = [*file.overrides, *CONTROLS[arm.control], *arm.overrides, f'adapter.kind="{arm.method}"']
    keys += [f'model.path="{arm.model}"'] if arm.model else []
    keys += [f"adapter.rank={arm.rank}"] if arm.method == "lora" else ['model.dtype="float32"']
    recipe = load_arm_recipe(file.recipe, keys, name, [f"trainer.lr={lr!r}"])
    trainer = {"budget": format_budget(recipe, *budget), "steps": LONG, "until": until}
    recipe = recipe.model_copy(
        update={
            "trainer": recipe.trainer.model_copy(update=trainer),
            "eval": recipe.eval.model_copy(update={"shares": SHARES, "every": 0}),
            "forecast": recipe.forecast.model_copy(update={"enabled": False}),
        }
    )
    folder = f"{make_slug(name)}-lr{lr:g}-s{seed}"
    return Job(
        arm=name, seed=seed, folder=out / folder, recipe=make_run_recipe(recipe, folder, seed, out, None)
    )


def read_validation_scores(job: Job) -> np.ndarray | None:
    """Read the share of right answers to each problem of the validation half (odd places). The score is the
    first one after the job's share of the budget, or the last one of a run that ended earlier. None before
    that."""
    points, trainer = read_course(job.folder, MAIN_SET), job.recipe.trainer
    budget = Every.parse(trainer.budget, "trainer.budget").part(trainer.until)
    shares = [right_shares for spent, right_shares in points if budget.share(spent) >= 1]
    shares += [right_shares for _, right_shares in points[-1:] if has_ended(job)]
    return shares[0][1::2] if shares else None


Run = Callable[[Sequence[Job]], Sequence[State]]
Scores = dict[str, dict[float, list[float]]]  # of arms and their learning rates, at each of RUNGS


def sweep_rates(
    file: ArmsFile, budget: Budget, out: Path, run: Run, seed: int = 0
) -> tuple[dict[str, float], Scores, list[State]]:
    """Return (the learning rate of each arm, scores, states) of successive halving (Jamieson and Talwalkar
    2016).

    The runs of the better half, two at least, go on to the end from where they are: at half of the budget a
    rate that will fall may still lead. No run is made for an arm with only one rate. An arm without any score
    has no learning rate in the result, and its ``states`` say why.
    """
    rates_of = {name: [*(arm.lrs or file.lrs)] for name, arm in file.arms.items()}
    swept: Scores = {name: {lr: [] for lr in lrs} for name, lrs in rates_of.items() if len(lrs) > 1}
    states = list[State]()
    for share in RUNGS:
        jobs = [make_job(file, name, lr, seed, budget, out, share) for name in swept for lr in rates_of[name]]
        states += run([rate_job for rate_job in jobs if read_validation_scores(rate_job) is None])
        for name in swept:
            rate_scores = {
                rate_job.recipe.trainer.lr: read_validation_scores(rate_job)
                for rate_job in jobs
                if rate_job.arm == name
            }
            scores = {
                lr: problem_scores for lr, problem_scores in rate_scores.items() if problem_scores is not None
            }
            swept[name] |= {
                lr: [*swept[name][lr], float(problem_scores.mean())] for lr, problem_scores in scores.items()
            }
            ranking = sorted(scores, key=lambda lr: (-scores[lr].mean(), lr))
            rates_of[name] = ranking[: 1 if share == 1 else max(2, (len(ranking) + 1) // 2)]
    return {name: lrs[0] for name, lrs in rates_of.items() if lrs}, swept, states


def read_course(folder: Path, name: str) -> list[tuple[Mapping[str, float], np.ndarray]]:
    """Read (spent, share of right answers to each problem) of every score of the set ``name`` so far."""
    rows = [row for row in RunFolder(folder).eval.rows() if row["set"] == name and "each" in row]
    return [(row["spent"], np.array([right / n if n else 0.0 for n, right in row["each"]])) for row in rows]


def build_line(job: Job, control: str) -> dict[str, Any] | None:
    """Return a finished run as plain numbers, from which tables are made; None for a run that has not
    ended."""
    points = read_course(job.folder, MAIN_SET)
    if not has_ended(job):
        return None
    folder = RunFolder(job.folder)
    rows = [*folder.metrics.rows()]
    abilities = abilities_left(rows)
    steps = [row for row in folder.ledger.rows() if row["event"] == "step"]
    first = next(row for row in folder.eval.rows() if row["set"] == MAIN_SET)
    steps_of_rows = [row["step"] for row in rows]
    episodes = np.cumsum([row.get("rollout/trajectories", 0.0) for row in rows])
    flops_of = {name: sum(row["flops"][name] for row in steps) for name in ("sample", "train", "measure")}
    return {
        "arm": job.arm,
        "seed": job.seed,
        "lr": job.recipe.trainer.lr,
        "control": control,
        "compute": [spent["flops"] for spent, _ in points],
        "played": np.interp(
            [spent["steps"] for spent, _ in points], [0, *steps_of_rows], [0.0, *episodes]
        ).tolist(),
        "each": [right.tolist() for _, right in points],
        "others": {
            name: [right.tolist() for _, right in read_course(job.folder, name)]
            for name in job.recipe.eval.downstream
        },
        "prompts": read_prompts_hash(folder, MAIN_SET),
        "k": first["k"],
        "base_pass_k": first["pass@k"],
        "kept": abilities and abilities.value,
        "truncated": mean(rows, "completions/clipped_ratio"),
        "flops": flops_of,
        "seconds": sum(row["seconds"] for row in steps),
        "interactions": int(sum(row.get("rollout/trajectories", 0) for row in rows)),
        "steps": len(steps),
    }


Line = Mapping[str, Any]


def select_ends(line: Line) -> np.ndarray:
    """Select [2, problems] right shares before and after training, on the test half (even places)."""
    return np.array(line["each"])[[0, -1], ::2]


def select_ends_at(line: Line, along: str, amount: float) -> np.ndarray:
    """Select as ``select_ends``, but take "after" at ``amount`` of ``along`` (compute, played), linear
    between scores."""
    shares = np.array(line["each"])[:, ::2]
    return np.stack([shares[0], [np.interp(amount, line[along], course) for course in shares.T]])


def collect_outcomes(
    lines: Sequence[Line], select: Callable[[Line], np.ndarray] = select_ends
) -> dict[str, Outcomes]:
    """Collect the outcomes of each arm by ``select``, with the mean over seeds as "before". Raises ValueError
    for runs on different problems."""
    if len({run["prompts"] for run in lines}) > 1:
        raise ValueError(
            "the runs were scored on different problems, so they do not compare; use one eval set"
        )
    outcomes_of = {}
    for name in dict.fromkeys(run["arm"] for run in lines):
        arm_lines = [run for run in lines if run["arm"] == name]
        shares = np.stack([select(run) for run in arm_lines])
        outcomes_of[name] = Outcomes(pre=shares[:, 0].mean(0), post=shares[:, 1])
    return outcomes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of a comparison: ``lines`` of all finished runs, the scores of the sweep in ``swept``, the
    learning rates in ``chosen``, and why runs ``failed``."""

    lines: Sequence[Mapping[str, Any]]
    swept: Scores
    chosen: Mapping[str, float]
    failed: Sequence[str]


def race_arms(file: ArmsFile, budget: Budget, seeds: Sequence[int], out: Path, run: Run) -> Compared:
    """Sweep the learning rates with the first seed, then race, seed after seed, so that arms can be compared
    before all runs have ended. ``run`` runs the jobs that have not ended."""
    chosen, swept, states = sweep_rates(file, budget, out, run, seeds[0])
    jobs = [make_job(file, name, lr, seed, budget, out) for seed in seeds for name, lr in chosen.items()]
    states += run(jobs)
    lines = [
        run_line
        for run_job in jobs
        if (run_line := build_line(run_job, file.arms[run_job.arm].control)) is not None
    ]
    failed = [f"{state.job.folder.name} failed: {state.error}" for state in states if state.what == "failed"]
    return Compared(lines=lines, swept=swept, chosen=chosen, failed=failed)
