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
from ostinato.apps.plan.cluster import Cluster
from ostinato.apps.plan.layouts import divisors, layouts, refuse
from ostinato.apps.plan.memory import host_margin, limit, margin, sequences_for, shares_base
from ostinato.apps.plan.problem import (
    Arrangement,
    Base,
    Clock,
    Memory,
    Phase,
    Placement,
    Problem,
    Setup,
    Times,
)
from ostinato.parallel.elements import stage_elements
from ostinato.parallel.gpus import GB
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

    def layouts(self, problem: Problem, world: int, phase: Phase) -> Iterator[Layout]:
        """Those of a phase on ``world`` ranks."""
        only = self.rollout_layout if phase == Phase.ROLLOUT else self.train_layout
        return layouts(problem, world, phase) if only is None else iter((only,) * (only.world == world))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setup of one phase, alone on its GPUs."""

    setup: Setup
    memory: Memory
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An arrangement with all that it costs."""

    arrangement: Arrangement
    memory: Mapping[Phase, Memory]
    times: Times

    def fullest(self) -> Phase:
        return max(self.memory, key=lambda phase: self.memory[phase].total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """What a search came to. ``near``: of each phase of which nothing fits, what missed by least."""

    plans: tuple[Plan, ...]  # fastest first
    tried: int  # setups
    near: Mapping[Phase, Candidate]
    reasons: Mapping[Base, str] = field(default_factory=dict)  # why a way to hold the base came to nothing


def search(problem: Problem, clock: Clock, allowed: Allowed | None = None) -> Ranking:
    """Ranked plans for all GPUs of the cluster; none in ``plans`` where nothing fits. Raises ValueError for a
    layout that was requested and that model, engine or number of GPUs do not have."""
    allowed = allowed or Allowed()
    _refuse(problem, allowed)
    worlds = list(_worlds(problem, allowed))
    if not worlds:
        raise ValueError(_no_world(problem, allowed))
    rankings = [_rank(problem, clock, allowed, *world) for world in worlds]
    plans = sorted(
        (plan for ranking in rankings for plan in ranking.plans), key=lambda plan: plan.times.total
    )
    best = (ranking for ranking in rankings if plans and plans[0] in ranking.plans)
    return replace(next(best, rankings[0]), plans=tuple(plans))


def _refuse(problem: Problem, allowed: Allowed) -> None:
    """Raise ValueError, in one sentence, for a layout that model or engine do not have."""
    try:
        name = "train-layout"
        if allowed.train_layout is not None:
            allowed.train_layout.refuse(problem.config)
        name = "rollout-layout"
        if allowed.rollout_layout is not None:
            allowed.rollout_layout.refuse(problem.config)
            refuse(problem.sampler, problem.config, allowed.rollout_layout)
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
        divided += [(part, total - part, Placement.APART) for part in sorted(parts) if 0 < part < total]
    for train, rollout, placement in divided:
        requested = ((allowed.train_layout, train), (allowed.rollout_layout, rollout))
        if all(layout is None or layout.world == ranks for layout, ranks in requested):
            yield train, rollout, placement


def _rank(
    problem: Problem, clock: Clock, allowed: Allowed, train: int, rollout: int, placement: Placement
) -> Ranking:
    """Plans of one way to divide the GPUs."""
    trained, sampled = trainers(problem, clock, allowed, train), samplers(problem, clock, allowed, rollout)
    pairs, reasons = _pairs(problem, clock, allowed, trained.fit, sampled.fit, placement)
    plans = [plan for pair in pairs if (plan := _plan(problem, clock, pair)) is not None]
    sieves = {Phase.TRAIN: trained, Phase.ROLLOUT: sampled}
    return Ranking(
        plans=tuple(sorted(plans, key=lambda plan: plan.times.total)),
        tried=sum(sieve.tried for sieve in sieves.values()),
        near={phase: one.near for phase, one in sieves.items() if one.near is not None and not one.fit},
        reasons=reasons,
    )


@dataclass(slots=True)
class Sieve:
    """Setups of one phase that fit, and what became of the others."""

    fit: list[Candidate] = field(default_factory=list)
    tried: int = 0
    near: Candidate | None = None

    def take(self, problem: Problem, setup: Setup, memory: Memory) -> bool:
        """Does it fit alone?"""
        self.tried += 1
        if margin(problem, memory) >= 0 and host_margin(problem, memory) >= 0:
            return True
        candidate = Candidate(setup=setup, memory=memory)
        if self.near is None or _distance(candidate) < _distance(self.near):
            self.near = candidate
        return False


def _distance(candidate: Candidate) -> tuple[bool, float]:
    """Those of which only weights were looked at come last."""
    partial = not candidate.setup.microbatch and not candidate.setup.sequences
    return partial, candidate.memory.total


def trainers(problem: Problem, clock: Clock, allowed: Allowed, world: int) -> Sieve:
    """Setups of the trainer that fit, fastest first.

    Rows of a microbatch are those of the longest sequence that may occur, twice and four times that. More
    rows are tried where fewer fit, and where keeping fits, recomputing with the fewest only: it is slower,
    but leaves room for a sampler.
    """
    sieve, work = Sieve(), problem.work
    least = -(-work.longest // 1024) * 1024
    for layout in allowed.layouts(problem, world, Phase.TRAIN):
        bare = Setup(layout=layout)
        weights = Memory(terms=bytes_of.trainer_rest(problem, bare, 0))
        if margin(problem, weights) < 0:  # a quick look that spares most layouts the rest
            sieve.take(problem, bare, weights)
            continue
        fits_kept = False
        for recompute in (True,) if layout.shard > 1 else (False, True):  # else gathered weights would stay
            for rows in (least,) if fits_kept else (least, 2 * least, 4 * least):
                microbatch = -(-rows // layout.row_shards) * layout.row_shards
                setup = replace(bare, microbatch=microbatch, recompute=recompute)
                memory = bytes_of.trainer_memory(problem, Phase.TRAIN, setup)
                if not sieve.take(problem, setup, memory):
                    break
                seconds = sum(clock.phase(problem, Phase.TRAIN, setup).values())
                sieve.fit.append(Candidate(setup=setup, memory=memory, seconds=seconds))
                fits_kept = fits_kept or not recompute
                if rows * layout.data >= work.rows / work.updates:
                    break  # one microbatch holds it all
    sieve.fit.sort(key=lambda one: one.seconds)
    return sieve


def samplers(problem: Problem, clock: Clock, allowed: Allowed, world: int) -> Sieve:
    """Setups of the sampler whose weights and at least one longest sequence fit, fastest first."""
    sieve = Sieve()
    for layout in allowed.layouts(problem, world, Phase.ROLLOUT):
        empty = Setup(layout=layout)
        memory = bytes_of.sampler_memory(problem, empty)
        free = margin(problem, memory) + memory.terms["KV cache"]
        setup = replace(empty, sequences=sequences_for(problem, empty, free))
        memory = bytes_of.sampler_memory(problem, setup)
        if sieve.take(problem, setup, memory) and setup.sequences:
            seconds = sum(clock.phase(problem, Phase.ROLLOUT, setup).values())
            sieve.fit.append(Candidate(setup=setup, memory=memory, seconds=seconds))
    sieve.fit.sort(key=lambda one: one.seconds)
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
    pairs: list[Arrangement] = []
    reasons: dict[Base, str] = {}
    for base in allowed.bases if placement == Placement.COLOCATED else (Base.TWO,):
        partners, why = _partners(train, base), Counter[str]()
        ways = (
            (one.seconds + other.seconds, i, j)
            for i, one in enumerate(partners)
            for j, other in enumerate(rollout)
        )
        best: list[tuple[float, int, Arrangement]] = []
        for least, i, j in sorted(ways):
            if len(best) >= FINAL and least >= best[FINAL - 1][0]:
                break
            one, other = partners[i], rollout[j]
            if base == Base.SHARED and (reason := shares_base(problem, one.setup, other.setup)):
                why[reason] += 1
                continue
            lag = allowed.lag if placement == Placement.APART else 0
            pair = Arrangement(train=one.setup, rollout=other.setup, base=base, placement=placement, lag=lag)
            setup = _seat(problem, pair, one.memory)
            if setup is None:
                continue
            if setup not in priced:
                priced[setup] = sum(clock.phase(problem, Phase.ROLLOUT, setup).values())
            insort(best, (one.seconds + priced[setup], len(best), replace(pair, rollout=setup)))
        pairs += [arrangement for *_, arrangement in best[:FINAL]]
        if not best:
            reasons[base] = why.most_common(1)[0][0] if why else _shortage(problem, partners, rollout, base)
    return pairs, reasons


def _partners(train: list[Candidate], base: Base) -> list[Candidate]:
    """Setups of the trainer that meet those of the sampler; for a shared base all that could share."""
    if base == Base.SHARED:
        return [one for one in train if one.setup.layout.pipeline == 1 and one.setup.layout.shard == 1]
    best: dict[Layout, Candidate] = {}
    for one in sorted(train, key=lambda one: one.memory.total):
        best.setdefault(one.setup.layout, one)
    leanest = sorted(best.values(), key=lambda one: (one.memory.total, str(one.setup.layout)))[:BREADTH]
    return list({one.setup: one for one in (*train[:BREADTH], *leanest)}.values())


def _seat(problem: Problem, pair: Arrangement, trained: Memory) -> Setup | None:
    """The sampler's setup with as many sequences as its cache has room for; None where the pair does not
    fit."""
    bare = replace(pair, rollout=replace(pair.rollout, sequences=0))
    train, rollout = (
        bytes_of.memory(problem, bare, phase, trained) for phase in (Phase.TRAIN, Phase.ROLLOUT)
    )
    if margin(problem, train) < 0 or min(host_margin(problem, one) for one in (train, rollout)) < 0:
        return None
    free = margin(problem, rollout) + rollout.terms["KV cache"]
    sequences = sequences_for(problem, bare.rollout, free)
    return replace(bare.rollout, sequences=sequences) if sequences else None


def _shortage(problem: Problem, train: Sequence[Candidate], rollout: Sequence[Candidate], base: Base) -> str:
    """By how much the pair that comes nearest does not fit, with a cache for the longest sequence only."""
    lacks: list[tuple[float, str]] = []
    for one in train:
        for other in rollout:
            pair = Arrangement(train=one.setup, rollout=replace(other.setup, sequences=1), base=base)
            over: dict[Phase, float] = {}
            for phase in (Phase.TRAIN, Phase.ROLLOUT):
                memory = bytes_of.memory(problem, pair, phase, one.memory)
                host = host_margin(problem, memory) / problem.cluster.per_node
                over[phase] = -min(margin(problem, memory), host)
            phase = max(over, key=lambda one: over[one])
            lacks.append((over[phase], f"{one.setup.layout} with {other.setup.layout} in {phase}"))
    if not lacks:
        return "trainer or sampler does not fit alone"
    least, where = min(lacks, key=lambda one: one[0])
    return f"{max(least, 0.0) / GB:.1f} GB a GPU too much at best, {where}"


def _plan(problem: Problem, clock: Clock, arrangement: Arrangement) -> Plan | None:
    """Everything of an arrangement; None where it does not fit after all."""
    memory = {phase: bytes_of.memory(problem, arrangement, phase) for phase in Phase}
    if any(margin(problem, one) < 0 for one in memory.values()):
        return None
    return Plan(arrangement=arrangement, memory=memory, times=clock.step(problem, arrangement))


def describe_limit(problem: Problem, plan: Plan) -> str:
    """What limits a plan: the phase and terms that fill the GPU, and what takes most of the time."""
    phase, times = plan.fullest(), plan.times
    full = plan.memory[phase]
    terms = sorted(full.terms, key=lambda term: -full.terms[term])[:2]
    largest = " and ".join(f"{term} {full.terms[term] / GB:.1f}" for term in terms)
    seconds, part, term = max((s, part, term) for part, of in times.terms.items() for term, s in of.items())
    share = seconds / max(times.total + times.overlapped, 1e-9)
    return (
        f"memory: {phase} needs {full.total / GB:.1f} of {limit(problem) / GB:.0f} GB ({largest}); "
        f"time: {part} {term}, {seconds:.1f} s, {share:.0%} of the step"
    )


def why_lost(winner: Plan, other: Plan) -> str:
    """One sentence: by how much another plan is slower, and where most of that comes from."""
    slower = other.times.total / max(winner.times.total, 1e-9) - 1
    if slower < 0.0005:
        return "as fast; it comes later in the order of layouts"
    first, second = (
        Counter({(part, term): s for part, terms in one.times.terms.items() for term, s in terms.items()})
        for one in (winner, other)
    )
    worst = max(sorted(first | second), key=lambda key: second[key] - first[key])
    return (
        f"{slower:.1%} slower: {' '.join(worst)} takes {second[worst]:.1f} s instead of {first[worst]:.1f} s"
    )


def distinct(plans: Iterable[Plan], number: int) -> list[Plan]:
    """The first plans that differ in more than rows of a microbatch or what sleeps."""
    best: dict[tuple[Layout, Layout, Base, Placement], Plan] = {}
    for plan in plans:
        a = plan.arrangement
        best.setdefault((a.train.layout, a.rollout.layout, a.base, a.placement), plan)
    return list(best.values())[:number]


def resize(cluster: Cluster, number: int) -> Cluster:
    """The same nodes, so many that they have ``number`` GPUs; of less than a node its share of the host."""
    per_node = min(number, cluster.per_node)
    host = cluster.host_memory / cluster.per_node * per_node
    return replace(cluster, nodes=number // per_node, per_node=per_node, host_memory=host)


def smallest(
    problem: Problem, clock: Clock, allowed: Allowed | None = None, most: int = 1024
) -> Ranking | None:
    """The plans on the fewest GPUs of this kind on which anything fits: within a node its divisors, then
    whole nodes; None beyond ``most``."""
    allowed, per_node = allowed or Allowed(), problem.cluster.per_node
    _refuse(problem, allowed)
    elements = stage_elements(problem.config, None, Layout(), 0)
    weights = (elements.trainable + elements.untrained) * problem.precision.base.num_bytes
    nodes = (*range(2, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16))
    for number in (*divisors(per_node), *(per_node * count for count in nodes)):
        if number > most or weights > number * limit(problem):
            continue  # not even the weights, cut evenly
        here = replace(problem, cluster=resize(problem.cluster, number))
        if any(_worlds(here, allowed)) and (ranking := search(here, clock, allowed)).plans:
            return ranking
    return None
