"""False pauses: the detectors of the loop on looks at a policy that stays as it is, with a judge that errs.

    python -m lab.product.quiet FILE --runs 20          1,000 policy steps a run, a look every 4; rows of FILE

Answers are those of the crowd that the base has learned from, gold is the panel of the experiment. The judge
prefers what is better by the truth, but in ``WRONG`` of the pairs the other one, and in ``SILENT`` neither.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path

import numpy as np

from lab.product.answers import features
from lab.product.corpora import draw, question_of
from lab.product.users import EPOCH, World, gold, utility
from ostinato.env.arithmetic import rows
from ostinato.launch.product.settings import PolicySettings
from ostinato.launch.product.watch import Answers, Probe, Watch, probe
from ostinato.product.actions import action_of
from ostinato.run import Jsonl

WRONG, SILENT = 0.2, 0.3
STEPS, EVERY, PROMPTS, JUDGES = 1000, 4, 128, 3


def look(world: World, rng: random.Random, number: int, n: int) -> Probe:
    """Two answers of the crowd to each of n problems."""
    prompts = rows("train", 50_000 + number, n)
    messages = tuple(one.messages or () for one in prompts)
    sides, truths = [], []
    for _ in range(2):
        texts = tuple(draw(one, rng) for one in prompts)
        found = [features(question_of(one), text) for one, text in zip(prompts, texts, strict=True)]
        panel = [
            np.mean([utility(world, one, rng.randrange(world.users), EPOCH) for _ in range(JUDGES)])
            + rng.gauss(0, world.noise / JUDGES**0.5)
            for one in found
        ]
        sides.append(Answers(messages=messages, texts=texts, gold=np.array(panel)))
        truths.append(np.array([gold(world, one, EPOCH) for one in found]))
    noise = np.array([rng.random() for _ in prompts])
    proxy = np.sign(truths[0] - truths[1]) * np.where(noise < WRONG, -1.0, 1.0)
    proxy = np.where(noise > 1 - SILENT, np.nan, proxy)
    return probe(number, 0.01 + 0.0001 * number, sides[0], sides[1], proxy)


def run(seed: int, settings: PolicySettings) -> dict[str, object]:
    """The first alarm of one run of STEPS, if any."""
    world, rng = World(seed=seed), random.Random(f"quiet/{seed}")
    first = look(world, rng, 1000 * seed, 4 * PROMPTS)
    cases = Counter(action_of(text).value for pair in first.texts for text in pair[:1])
    looks = STEPS // EVERY
    watch = Watch.of(first, sum(cases.values()), settings.counted, looks, settings.false_alarms)
    for number in range(1, looks + 1):
        watch, alarms = watch.update(look(world, rng, 1000 * seed + number, PROMPTS))
        if alarms:
            return {"seed": seed, "step": number * EVERY, "alarms": [one.sentence for one in alarms]}
    return {"seed": seed, "step": None, "alarms": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--false-alarms", type=float, default=0.05)
    args = parser.parse_args()
    settings = PolicySettings(recipe="", false_alarms=args.false_alarms)
    kept = Jsonl(args.file)
    for seed in range(sum(1 for _ in kept.rows()), args.runs):
        kept.append(run(seed, settings))


if __name__ == "__main__":
    main()
