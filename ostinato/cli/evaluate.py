"""``ostinato eval``: held-out scores without training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from ostinato.config import check_files
from ostinato.launch.machine import configure_threads, resolve_auto
from ostinato.launch.models import load_recipe
from ostinato.launch.policy import check_adapter, load_initial_adapters, load_trained
from ostinato.launch.progress import Row, format_interval
from ostinato.observe.concerns import unsolved
from ostinato.run import GREEDY_SET, MAIN_SET
from ostinato.terminal import say, show_log


@show_log()
def evaluate(target: str, overrides: Sequence[str], adapter: str = "") -> None:
    """Print pass@1 (and pass@k where k > 1) and mean reward of the last policy of a run, or of an untrained
    model (with ``adapter``, a run folder or an adapter's, else the adapter.path of its recipe), on the main
    set, the same one greedily, and each downstream one. Raises RewardFails, a ValueError, where a reward
    function gives no verdict to any answer of a set.

    It computes with the model's own weights, as what is exported does, whatever the run sampled with; the
    override ``engine.weights=...`` scores a sampler of others.
    """
    recipe, run = load_recipe(target, "engine.weights=model", *overrides)
    check_adapter(run, adapter)
    check_files(recipe)
    configure_threads(recipe)
    recipe = resolve_auto(recipe)
    from ostinato.launch.engine import new_any_engine
    from ostinato.launch.inputs import compute_rollout_need, new_stage, prepare_inputs
    from ostinato.launch.loop import new_evaluations
    from ostinato.pipeline.evaluate import evaluate_groups as measure
    from ostinato.pipeline.failed import list_failures, refuse_failures

    with prepare_inputs(recipe, training=False) as inputs:
        decoder = inputs.decoder
        step, adapters = (
            load_trained(recipe, run, decoder) if run else load_initial_adapters(recipe, decoder, adapter)
        )
        engine = new_any_engine(recipe, inputs.decoder, inputs.renderer, need=compute_rollout_need(inputs))
        engine.publish(adapters, step)
        stage = new_stage(inputs, engine, inputs.grader)
        for warning in inputs.warnings:
            say(f"warning: {warning}")
        weights = "" if recipe.engine.weights == "model" else f", {recipe.engine.weights} weights"
        for evaluation in new_evaluations(inputs):
            row, groups = asyncio.run(measure(stage, evaluation, step))
            refuse_failures(list_failures(groups), f"the evaluation of the set {evaluation.name}")
            of = {MAIN_SET: f"{row['split']} split", GREEDY_SET: f"{row['split']} split, greedy"}
            name = of.get(row["set"], row["set"])
            head = f"{target} after {step} steps{weights}, {name}, {row['n']} prompts, {row['seconds']:.1f} s"
            say(head, *summary(row))


def summary(row: Row) -> Iterator[str]:
    """A row of eval.jsonl in a few lines."""
    yield f"pass@1  {format_interval(row, 'pass@1')}"
    if row["k"] > 1:
        yield f"pass@{row['k']}  {format_interval(row, 'pass@k')}"
    yield f"reward  {format_interval(row, 'reward')} (mean)"
    if row["set"] != GREEDY_SET and (why := unsolved([row])):
        yield f"warning: {why}"
    if row["excluded"]:
        why = [f"{row[key]:.0f} {key}" for key in row if key.startswith("faults/")]
        yield f"{row['excluded']} prompts without enough verdicts were left out ({', '.join(why)})"
