"""Which arrangement is fastest among those that fit, what binds it, and why the others lost.

    layouts of each phase --memory--> those that fit --seconds--> ranked
        --pairs of trainer and sampler: one base, two copies, swapped--> fit together
        --cache that is left decides how many sequences decode at once--> seconds of the step --> ranked

Every sampler meets the fastest and the leanest of the trainer (``BREADTH`` of each), and for a shared base
all that can share; a test compares with every pair on a small cluster.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostinato.apps.plan import memory as bytes_of
from ostinato.apps.plan.counts import counts
from ostinato.apps.plan.engines import refuse
from ostinato.apps.plan.layouts import divisors, layouts
from ostinato.apps.plan.memory import host_margin, limit, margin, sequences_for, shares_base
from ostinato.apps.plan.problem import (
    GB,
    Arrangement,
    Base,
    Clock,
    Cluster,
    Memory,
    Phase,
    Placement,
    Problem,
    Recompute,
    Setup,
    Times,
)
from ostinato.parallel.layout import Layout

BREADTH = 24  # setups of the trainer, so many of the fastest and of the leanest, that meet every sampler's
FINAL = 16  # arrangements for each way to hold the base whose whole step is priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the search may use."""

    placements: tuple[Placement, ...] = (Placement.COLOCATED,)
    bases: tuple[Base, ...] = (Base.SHARED, Base.TWO, Base.SWAPPED)
    lag: int = 0  # optimizer steps that a sampler apart may be behind
    train_layout: Layout | None = None  # only this one
    rollout_layout: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setup of one phase, alone on its GPUs."""

    setup: Setup
    memory: Memory
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An arrangement with all that it costs."""

    arrangement: Arrangement
    memory: Mapping[Phase, Memory]
    times: Times

    def fullest(self) -> Phase:
        return max(self.memory, key=lambda phase: self.memory[phase].total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found. ``near``: of each phase of which nothing fits, what missed by least."""

    plans: tuple[Plan, ...]  # fastest first
    tried: int  # setups
    near: Mapping[Phase, Candidate]
    reasons: Mapping[Base, str] = field(default_factory=dict)  # why a way to hold the base came to nothing


def search(problem: Problem, clock: Clock, allowed: Allowed | None = None) -> Found:
    """Ranked plans for all GPUs of the cluster; none in ``plans`` where nothing fits. Raises ValueError for a
    layout that was requested and that model, engine or number of GPUs do not have."""
    allowed = allowed or Allowed()
    _refuse(problem, allowed)
    worlds = list(_worlds(problem, allowed))
    if not worlds:
        raise ValueError(_no_world(problem, allowed))
    found = [_paired(problem, clock, allowed, *world) for world in worlds]
    first = min(
        (one for one in found if one.plans), key=lambda one: one.plans[0].times.total, default=found[0]
    )
    plans = sorted((plan for one in found for plan in one.plans), key=lambda plan: plan.times.total)
    sieves = {Phase.TRAIN: first.train, Phase.ROLLOUT: first.rollout}
    near = {phase: one.near for phase, one in sieves.items() if one.near is not None and not one.fit}
    tried = sum(one.tried for one in sieves.values())
    return Found(plans=tuple(plans), tried=tried, near=near, reasons=first.reasons)


def _refuse(problem: Problem, allowed: Allowed) -> None:
    """Raise ValueError, in one sentence, for a layout that model or engine do not have."""
    given = {"train-layout": allowed.train_layout, "rollout-layout": allowed.rollout_layout}
    for name, layout in given.items():
        if layout is None:
            continue
        try:
            layout.refuse(problem.config)
            if name == "rollout-layout":
                refuse(problem.sampler, problem.config, layout)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _no_world(problem: Problem, allowed: Allowed) -> str:
    given = {"train-layout": allowed.train_layout, "rollout-layout": allowed.rollout_layout}
    requested = [f"{name} is {layout} of {layout.world} ranks" for name, layout in given.items() if layout]
    free = replace(allowed, train_layout=None, rollout_layout=None)
    ways = [f"{train} train and {rollout} sample" for train, rollout, _ in _worlds(problem, free)]
    return (
        f"{' and '.join(requested)}, but of {problem.cluster.num_gpus} GPUs {' or '.join(ways)}; use as many "
        "ranks, or other GPUs"
    )


def _worlds(problem: Problem, allowed: Allowed) -> Iterator[tuple[int, int, Placement]]:
    """(ranks that train, ranks that sample, where), but for those of which the requested layouts are not."""
    total = problem.cluster.num_gpus
    divided = [(total, total, Placement.COLOCATED)] if Placement.COLOCATED in allowed.placements else []
    if Placement.APART in allowed.placements:
        unit = problem.cluster.per_node if problem.cluster.nodes > 1 else 1
        parts = {max(unit, round(total * share / unit) * unit) for share in (0.25, 0.5, 0.75)}
        divided += [(one, total - one, Placement.APART) for one in sorted(parts) if 0 < one < total]
    for train, rollout, placement in divided:
        requested = ((allowed.train_layout, train), (allowed.rollout_layout, rollout))
        if all(layout is None or layout.world == ranks for layout, ranks in requested):
            yield train, rollout, placement


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paired:
    """What one way to divide the GPUs came to."""

    train: Sieve
    rollout: Sieve
    plans: list[Plan]
    reasons: dict[Base, str]


def _paired(
    problem: Problem,
    clock: Clock,
    allowed: Allowed,
    train_world: int,
    rollout_world: int,
    placement: Placement,
) -> _Paired:
    train = trainers(problem, clock, allowed, train_world)
    rollout = samplers(problem, allowed, rollout_world)
    alone = [replace(one, seconds=clock.phase(problem, Phase.ROLLOUT, one.setup)) for one in rollout.fit]
    alone.sort(key=lambda one: one.total)
    pairs, reasons = _pairs(problem, clock, allowed, train.fit, alone, placement)
    plans = [_plan(problem, clock, arrangement) for arrangement in pairs]
    ranked = sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.times.total)
    return _Paired(train=train, rollout=rollout, plans=ranked, reasons=reasons)


@dataclass(slots=True)
class Sieve:
    """Setups of one phase that fit, and what became of the others."""

    fit: list[Candidate] = field(default_factory=list)
    tried: int = 0
    near: Candidate | None = None

    def take(self, problem: Problem, setup: Setup, found: Memory) -> Candidate | None:
        """The candidate, if it fits alone."""
        self.tried += 1
        candidate = Candidate(setup=setup, memory=found, seconds={})
        if margin(problem, found) >= 0 and host_margin(problem, found) >= 0:
            return candidate
        if self.near is None or (_partial(self.near), self.near.memory.total) > (
            _partial(candidate),
            found.total,
        ):
            self.near = candidate
        return None


def _partial(candidate: Candidate) -> bool:
    """Was only its weights looked at?"""
    return not candidate.setup.microbatch and not candidate.setup.sequences


def row_choices(problem: Problem) -> tuple[int, ...]:
    """Rows of a microbatch to try: the longest sequence that may occur, twice and four times that."""
    least = -(-problem.work.longest // 1024) * 1024
    return (least, 2 * least, 4 * least)


def trainers(problem: Problem, clock: Clock, allowed: Allowed, world: int) -> Sieve:
    """Setups of the trainer that fit, fastest first.

    More rows are tried where fewer fit, and where keeping fits, recomputing with the fewest only: it is
    slower, but leaves room for a sampler.
    """
    sieve, choices = Sieve(), row_choices(problem)
    chosen = layouts(problem, world, Phase.TRAIN)
    if allowed.train_layout is not None:
        chosen = iter((allowed.train_layout,) if allowed.train_layout.world == world else ())
    for layout in chosen:
        if not _weights_fit(problem, layout, sieve):
            continue
        fits_kept = False
        for recompute in Recompute:
            if layout.shard > 1 and recompute == Recompute.NONE:
                continue  # gathered weights would stay until backward
            for rows in choices[:1] if fits_kept else choices:
                setup = Setup(
                    layout=layout,
                    microbatch=-(-rows // layout.row_shards) * layout.row_shards,
                    recompute=recompute,
                )
                found = sieve.take(problem, setup, bytes_of.trainer_memory(problem, Phase.TRAIN, setup))
                if found is None:
                    break
                sieve.fit.append(replace(found, seconds=clock.phase(problem, Phase.TRAIN, setup)))
                fits_kept = fits_kept or recompute == Recompute.NONE
                if rows * layout.data >= problem.work.rows / problem.work.updates:
                    break  # one microbatch holds it all
    sieve.fit.sort(key=lambda one: one.total)
    return sieve


def _weights_fit(problem: Problem, layout: Layout, sieve: Sieve) -> bool:
    """A quick look that spares most layouts the rest."""
    setup = Setup(layout=layout)
    terms = bytes_of.trainer_rest(problem, setup, 0)
    if sum(terms.values()) <= limit(problem):
        return True
    sieve.take(problem, setup, Memory(terms=terms))
    return False


def samplers(problem: Problem, allowed: Allowed, world: int) -> Sieve:
    """Setups of the sampler whose weights and at least one longest sequence fit."""
    sieve = Sieve()
    chosen = layouts(problem, world, Phase.ROLLOUT)
    if allowed.rollout_layout is not None:
        chosen = iter((allowed.rollout_layout,) if allowed.rollout_layout.world == world else ())
    for layout in chosen:
        empty = Setup(layout=layout)
        found = bytes_of.sampler_memory(problem, empty)
        free = margin(problem, found) + found.terms["KV cache"]
        setup = replace(empty, sequences=sequences_for(problem, empty, free))
        kept = sieve.take(problem, setup, bytes_of.sampler_memory(problem, setup))
        if kept is not None and setup.sequences:
            sieve.fit.append(kept)
    return sieve


def _pairs(
    problem: Problem,
    clock: Clock,
    allowed: Allowed,
    train: list[Candidate],
    rollout: list[Candidate],
    placement: Placement,
) -> tuple[list[Arrangement], dict[Base, str]]:
    """The ``FINAL`` fastest arrangements that fit of every way to hold the base, refit and switches not
    counted; and why a way came to nothing.

    Pairs come in the order of what they take with all slots that a sampler has by itself: beside a trainer
    it has no more of them, and is taken to be no faster. So the first pairs say when to stop.
    """
    priced: dict[Setup, float] = {}
    found: list[Arrangement] = []
    reasons: dict[Base, str] = {}
    for base in allowed.bases if placement == Placement.COLOCATED else (Base.TWO,):
        partners, why = _partners(train, base), Counter[str]()
        ways = [
            (one.total + other.total, i, j)
            for i, one in enumerate(partners)
            for j, other in enumerate(rollout)
        ]
        best: list[tuple[float, int, Arrangement]] = []
        for least, i, j in sorted(ways):
            if len(best) >= FINAL and least >= best[FINAL - 1][0]:
                break
            one, other = partners[i], rollout[j]
            if base == Base.SHARED and (reason := shares_base(problem, one.setup, other.setup)):
                why[reason] += 1
                continue
            arrangement = _together(problem, allowed, one, other, base, placement)
            if arrangement is None:
                continue
            setup = arrangement.rollout
            if setup not in priced:
                priced[setup] = sum(clock.phase(problem, Phase.ROLLOUT, setup).values())
            insort(best, (one.total + priced[setup], len(best), arrangement))
        found += [arrangement for *_, arrangement in best[:FINAL]]
        if not best:
            reasons[base] = why.most_common(1)[0][0] if why else _shortage(problem, partners, rollout, base)
    return found, reasons


def _partners(train: list[Candidate], base: Base) -> list[Candidate]:
    """Setups of the trainer that meet those of the sampler; for a shared base all that could share."""
    if base == Base.SHARED:
        return [one for one in train if one.setup.layout.pipeline == 1 and one.setup.layout.shard == 1]
    chosen = {one.setup: one for one in (*train[:BREADTH], *leanest(train))}
    return list(chosen.values())


def leanest(train: Iterable[Candidate]) -> list[Candidate]:
    """The ``BREADTH`` layouts of fewest bytes, each with its setup of fewest."""
    best: dict[Layout, Candidate] = {}
    for one in train:
        kept = best.setdefault(one.setup.layout, one)
        if one.memory.total < kept.memory.total:
            best[one.setup.layout] = one
    return sorted(best.values(), key=lambda one: (one.memory.total, str(one.setup.layout)))[:BREADTH]


def _shortage(problem: Problem, train: Sequence[Candidate], rollout: Sequence[Candidate], base: Base) -> str:
    """By how much the pair that comes nearest does not fit, with a cache for the longest sequence only."""
    best: tuple[float, str] | None = None
    for one in train:
        for other in rollout:
            pair = Arrangement(
                train=one.setup, logprobs=one.setup, rollout=replace(other.setup, sequences=1), base=base
            )
            over = {phase: _over(problem, pair, phase, one) for phase in (Phase.TRAIN, Phase.ROLLOUT)}
            phase = max(over, key=lambda one: over[one])
            if best is None or over[phase] < best[0]:
                best = (over[phase], f"{one.setup.layout} with {other.setup.layout} in {phase}")
    if best is None:
        return "trainer or sampler does not fit alone"
    return f"{max(best[0], 0.0) / GB:.1f} GB a GPU too much at best, {best[1]}"


def _over(problem: Problem, arrangement: Arrangement, phase: Phase, train: Candidate) -> float:
    """Bytes a GPU too much, of its own memory or of its part of the host's."""
    found = bytes_of.memory(problem, arrangement, phase, train.memory)
    return max(-margin(problem, found), -host_margin(problem, found) / problem.cluster.per_node)


def _together(
    problem: Problem, allowed: Allowed, train: Candidate, rollout: Candidate, base: Base, placement: Placement
) -> Arrangement | None:
    """The pair, with as many sequences as its cache has room for; None where it does not fit."""
    arrangement = Arrangement(
        train=train.setup,
        logprobs=train.setup,
        rollout=replace(rollout.setup, sequences=0),
        placement=placement,
        base=base,
        lag=allowed.lag if placement == Placement.APART else 0,
    )
    for phase in (Phase.TRAIN, Phase.ROLLOUT):
        found = bytes_of.memory(problem, arrangement, phase, train.memory)
        if host_margin(problem, found) < 0 or (phase == Phase.TRAIN and margin(problem, found) < 0):
            return None
    free = margin(problem, found) + found.terms["KV cache"]
    sequences = sequences_for(problem, arrangement.rollout, free)
    return replace(arrangement, rollout=replace(rollout.setup, sequences=sequences)) if sequences else None


def _plan(problem: Problem, clock: Clock, arrangement: Arrangement) -> Plan | None:
    """Everything of an arrangement; None where it does not fit after all."""
    found = {phase: bytes_of.memory(problem, arrangement, phase) for phase in Phase}
    if any(margin(problem, one) < 0 for one in found.values()):
        return None
    return Plan(arrangement=arrangement, memory=found, times=clock.step(problem, arrangement))


def binding(problem: Problem, plan: Plan) -> str:
    """What limits a plan: the phase and terms that fill the GPU, and what takes most of the time."""
    phase = plan.fullest()
    full = plan.memory[phase]
    terms = sorted(full.terms, key=lambda term: -full.terms[term])[:2]
    largest = " and ".join(f"{term} {full.terms[term] / GB:.1f}" for term in terms)
    part, term, seconds = slowest(plan.times)
    share = seconds / max(plan.times.total + plan.times.overlapped, 1e-9)
    return (
        f"memory: {phase} needs {full.total / GB:.1f} of {limit(problem) / GB:.0f} GB ({largest}); "
        f"time: {part} {term}, {seconds:.1f} s, {share:.0%} of the step"
    )


def slowest(times: Times) -> tuple[str, str, float]:
    """(phase, term, seconds) of the longest term."""
    found = [(part, term, s) for part, terms in times.terms.items() for term, s in terms.items()]
    return max(found, key=lambda one: one[2], default=("", "", 0.0))


def why_lost(winner: Plan, other: Plan) -> str:
    """One sentence: by how much another plan is slower, and where most of that comes from."""
    slower = other.times.total / max(winner.times.total, 1e-9) - 1
    terms = {
        (part, term)
        for times in (winner.times, other.times)
        for part in times.terms
        for term in times.terms[part]
    }

    def seconds(times: Times, key: tuple[str, str]) -> float:
        return times.terms.get(key[0], {}).get(key[1], 0.0)

    if not terms:
        return "no slower"
    worst = max(sorted(terms), key=lambda key: seconds(other.times, key) - seconds(winner.times, key))
    mine, theirs = seconds(winner.times, worst), seconds(other.times, worst)
    if slower < 0.0005:
        return "as fast; it comes later in the order of layouts"
    return f"{slower:.1%} slower: {' '.join(worst)} takes {theirs:.1f} s instead of {mine:.1f} s"


def distinct(plans: Iterable[Plan], number: int) -> list[Plan]:
    """The first plans that differ in more than rows of a microbatch or what sleeps."""
    found: dict[tuple[str, str, Base, Placement], Plan] = {}
    for plan in plans:
        a = plan.arrangement
        key = (str(a.train.layout), str(a.rollout.layout), a.base, a.placement)
        found.setdefault(key, plan)
    return list(found.values())[:number]


def sizes(per_node: int, most: int) -> tuple[int, ...]:
    """Numbers of GPUs to try: within a node its divisors, then whole nodes."""
    steps = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    return tuple(n for n in (*divisors(per_node), *(per_node * nodes for nodes in steps[1:])) if n <= most)


def resized(cluster: Cluster, number: int) -> Cluster:
    """The same nodes, so many that they have ``number`` GPUs; of less than a node its share of the host."""
    per_node = min(number, cluster.per_node)
    host = cluster.host_memory / cluster.per_node * per_node
    return replace(cluster, nodes=number // per_node, per_node=per_node, host_memory=host)


def smallest(
    problem: Problem, clock: Clock, allowed: Allowed | None = None, most: int = 1024
) -> Found | None:
    """The plans on the fewest GPUs of this kind on which anything fits; None beyond ``most``."""
    allowed = allowed or Allowed()
    _refuse(problem, allowed)
    weights = counts(problem.config).total * problem.precision.base.num_bytes
    for number in sizes(problem.cluster.per_node, most):
        if weights > number * limit(problem):
            continue  # not even the weights, cut evenly
        here = replace(problem, cluster=resized(problem.cluster, number))
        if any(_worlds(here, allowed)) and (found := search(here, clock, allowed)).plans:
            return found
    return None
