"""Find the fastest arrangement that fits, what limits it, and why the others are slower.

    layouts of each phase --memory--> those that fit --seconds--> ranked
        --pairs of trainer and sampler: one base, two copies, swapped--> fit together
        --cache that is left decides how many sequences decode at once--> seconds of the step --> ranked

Every setup of the sampler is paired with the fastest and the leanest setups of the trainer (``BREADTH`` of
each), and for a shared base with all that can share. A test compares with every pair on a small cluster.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostinato.apps.plan import memory as bytes_of
from ostinato.apps.plan.layouts import layouts, refuse
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
from ostinato.parallel.gpus import GB
from ostinato.parallel.layout import Layout

BREADTH = 24  # of the fastest and of the leanest setups of the trainer, for pairs with all of the sampler
FINAL = 16  # arrangements for each way to hold the base, of which the whole step is priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The placements, bases and layouts that the search may use."""

    placements: tuple[Placement, ...] = (Placement.COLOCATED,)
    bases: tuple[Base, ...] = (Base.SHARED, Base.TWO, Base.SWAPPED)
    lag: int = 0  # optimizer steps that a sampler apart may be behind
    train_layout: Layout | None = None  # None: any
    rollout_layout: Layout | None = None

    def layouts(self, problem: Problem, world: int, phase: Phase) -> Iterator[Layout]:
        """Return the layouts of a phase on ``world`` ranks."""
        requested_layout = self.rollout_layout if phase == Phase.ROLLOUT else self.train_layout
        return (
            layouts(problem, world, phase)
            if requested_layout is None
            else iter((requested_layout,) * (requested_layout.world == world))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setup of a phase, alone on its GPUs."""

    setup: Setup
    memory: Memory
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An arrangement with its memory and time."""

    arrangement: Arrangement
    memory: Mapping[Phase, Memory]
    times: Times

    def fullest(self) -> Phase:
        return max(self.memory, key=lambda phase: self.memory[phase].total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The result of a search. ``near``: of each phase in which nothing fits, the nearest candidate."""

    plans: tuple[Plan, ...]  # fastest first
    tried: int  # setups
    near: Mapping[Phase, Candidate]
    reasons: Mapping[Base, str] = field(default_factory=dict)  # why no pair of a base fits


def search(problem: Problem, clock: Clock, allowed: Allowed | None = None) -> Ranking:
    """Rank plans for all GPUs of the cluster; ``plans`` is empty where nothing fits. Raises ValueError for a
    requested layout that does not suit the model, the engine or the number of GPUs."""
    allowed = allowed or Allowed()
    refuse_layouts(problem, allowed)
    worlds = list(list_worlds(problem, allowed))
    if not worlds:
        raise ValueError(_explain_no_world(problem, allowed))
    rankings = [_rank_world(problem, clock, allowed, *world) for world in worlds]
    plans = sorted(
        (plan for ranking in rankings for plan in ranking.plans), key=lambda plan: plan.times.total
    )
    best = (ranking for ranking in rankings if plans and plans[0] in ranking.plans)
    return replace(next(best, rankings[0]), plans=tuple(plans))


def refuse_layouts(problem: Problem, allowed: Allowed) -> None:
    """Raise ValueError, in a sentence, for a requested layout that does not suit the model or the engine."""
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


def _explain_no_world(problem: Problem, allowed: Allowed) -> str:
    """Describe which numbers of ranks the requested layouts would need."""
    layout_options = {"train-layout": allowed.train_layout, "rollout-layout": allowed.rollout_layout}
    requests = [
        f"{name} is {layout} of {layout.world} ranks" for name, layout in layout_options.items() if layout
    ]
    free = replace(allowed, train_layout=None, rollout_layout=None)
    parts = [f"{train} train and {rollout} sample" for train, rollout, _ in list_worlds(problem, free)]
    return (
        f"{' and '.join(requests)}, but of {problem.cluster.num_gpus} GPUs {' or '.join(parts)}; use as many "
        "ranks, or other GPUs"
    )


def list_worlds(problem: Problem, allowed: Allowed) -> Iterator[tuple[int, int, Placement]]:
    """Yield (ranks that train, ranks that sample, placement) of splits that suit the requested layouts."""
    total = problem.cluster.num_gpus
    splits = [(total, total, Placement.COLOCATED)] if Placement.COLOCATED in allowed.placements else []
    if Placement.APART in allowed.placements:
        unit = problem.cluster.per_node if problem.cluster.nodes > 1 else 1
        parts = {max(unit, round(total * share / unit) * unit) for share in (0.25, 0.5, 0.75)}
        splits += [(part, total - part, Placement.APART) for part in sorted(parts) if 0 < part < total]
    for train, rollout, placement in splits:
        layout_ranks = ((allowed.train_layout, train), (allowed.rollout_layout, rollout))
        if all(layout is None or layout.world == ranks for layout, ranks in layout_ranks):
            yield train, rollout, placement


def _rank_world(
    problem: Problem, clock: Clock, allowed: Allowed, train: int, rollout: int, placement: Placement
) -> Ranking:
    """Rank the plans of a way to divide the GPUs."""
    train_sieve, rollout_sieve = (
        trainers(problem, clock, allowed, train),
        samplers(problem, clock, allowed, rollout),
    )
    pairs, reasons = _match_pairs(problem, clock, allowed, train_sieve.fit, rollout_sieve.fit, placement)
    plans = [plan for pair in pairs if (plan := _make_plan(problem, clock, pair)) is not None]
    sieves = {Phase.TRAIN: train_sieve, Phase.ROLLOUT: rollout_sieve}
    return Ranking(
        plans=tuple(sorted(plans, key=lambda plan: plan.times.total)),
        tried=sum(sieve.tried for sieve in sieves.values()),
        near={
            phase: sieve.near for phase, sieve in sieves.items() if sieve.near is not None and not sieve.fit
        },
        reasons=reasons,
    )


@dataclass(slots=True)
class Sieve:
    """The setups of a phase that fit, the number of tried setups, and the nearest that does not fit."""

    fit: list[Candidate] = field(default_factory=list)
    tried: int = 0
    near: Candidate | None = None

    def take(self, problem: Problem, setup: Setup, memory: Memory) -> bool:
        """Count a setup and return whether it fits alone."""
        self.tried += 1
        if margin(problem, memory) >= 0 and host_margin(problem, memory) >= 0:
            return True
        candidate = Candidate(setup=setup, memory=memory)
        if self.near is None or _measure_distance(candidate) < _measure_distance(self.near):
            self.near = candidate
        return False


def _measure_distance(candidate: Candidate) -> tuple[bool, float]:
    """Return the order of candidates that do not fit: those whose weights alone do not fit come last."""
    partial = not candidate.setup.microbatch and not candidate.setup.sequences
    return partial, candidate.memory.total


def trainers(problem: Problem, clock: Clock, allowed: Allowed, world: int) -> Sieve:
    """Return the setups of the trainer that fit, fastest first.

    Rows of a microbatch are those of the longest sequence that may occur, twice and four times that. More
    rows are tried where fewer fit. Where a setup without recompute fits, recompute is tried only with the
    fewest rows: it is slower, but leaves room for a sampler.
    """
    sieve, work = Sieve(), problem.work
    min_rows = -(-work.longest // 1024) * 1024
    for layout in allowed.layouts(problem, world, Phase.TRAIN):
        bare = Setup(layout=layout)
        weights = Memory(terms=bytes_of.trainer_rest(problem, bare, 0))
        if margin(problem, weights) < 0:  # a quick check that rules out most layouts
            sieve.take(problem, bare, weights)
            continue
        fits_without_recompute = False
        for recompute in (True,) if layout.shard > 1 else (False, True):  # else gathered weights would stay
            for rows in (min_rows,) if fits_without_recompute else (min_rows, 2 * min_rows, 4 * min_rows):
                microbatch = -(-rows // layout.row_shards) * layout.row_shards
                setup = replace(bare, microbatch=microbatch, recompute=recompute)
                memory = bytes_of.trainer_memory(problem, Phase.TRAIN, setup)
                if not sieve.take(problem, setup, memory):
                    break
                seconds = sum(clock.phase(problem, Phase.TRAIN, setup).values())
                sieve.fit.append(Candidate(setup=setup, memory=memory, seconds=seconds))
                fits_without_recompute = fits_without_recompute or not recompute
                if rows * layout.data >= work.rows / work.updates:
                    break  # all rows are in a single microbatch
    sieve.fit.sort(key=lambda candidate: candidate.seconds)
    return sieve


def samplers(problem: Problem, clock: Clock, allowed: Allowed, world: int) -> Sieve:
    """Return the setups of the sampler whose weights and at least one longest sequence fit, fastest first."""
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
    sieve.fit.sort(key=lambda candidate: candidate.seconds)
    return sieve


def _match_pairs(
    problem: Problem,
    clock: Clock,
    allowed: Allowed,
    train: list[Candidate],
    rollout: list[Candidate],
    placement: Placement,
) -> tuple[list[Arrangement], dict[Base, str]]:
    """Return the ``FINAL`` fastest arrangements that fit for every way to hold the base, without refit and
    switches; and the reason for each way in which none fits.

    Pairs come in the order of their seconds with all slots that a sampler has by itself. Beside a trainer it
    has no more slots, and is assumed to be no faster. So these seconds are a lower bound, and the loop can
    stop early.
    """
    seconds_by_setup: dict[Setup, float] = {}
    pairs: list[Arrangement] = []
    reasons: dict[Base, str] = {}
    for base in allowed.bases if placement == Placement.COLOCATED else (Base.TWO,):
        partners, reason_counts = _choose_partners(train, base), Counter[str]()
        candidates = (
            (trainer.seconds + sampler.seconds, i, j)
            for i, trainer in enumerate(partners)
            for j, sampler in enumerate(rollout)
        )
        best: list[tuple[float, int, Arrangement]] = []
        for bound, i, j in sorted(candidates):
            if len(best) >= FINAL and bound >= best[FINAL - 1][0]:
                break
            trainer, sampler = partners[i], rollout[j]
            if base == Base.SHARED and (reason := shares_base(problem, trainer.setup, sampler.setup)):
                reason_counts[reason] += 1
                continue
            lag = allowed.lag if placement == Placement.APART else 0
            pair = Arrangement(
                train=trainer.setup, rollout=sampler.setup, base=base, placement=placement, lag=lag
            )
            setup = _fit_sampler(problem, pair, trainer.memory)
            if setup is None:
                continue
            if setup not in seconds_by_setup:
                seconds_by_setup[setup] = sum(clock.phase(problem, Phase.ROLLOUT, setup).values())
            insort(best, (trainer.seconds + seconds_by_setup[setup], len(best), replace(pair, rollout=setup)))
        pairs += [arrangement for *_, arrangement in best[:FINAL]]
        if not best:
            reasons[base] = (
                reason_counts.most_common(1)[0][0]
                if reason_counts
                else _describe_shortage(problem, partners, rollout, base)
            )
    return pairs, reasons


def _choose_partners(train: list[Candidate], base: Base) -> list[Candidate]:
    """Return the setups of the trainer to pair with the sampler's; for a shared base all that could share."""
    if base == Base.SHARED:
        return [
            candidate
            for candidate in train
            if candidate.setup.layout.pipeline == 1 and candidate.setup.layout.shard == 1
        ]
    best: dict[Layout, Candidate] = {}
    for candidate in sorted(train, key=lambda candidate: candidate.memory.total):
        best.setdefault(candidate.setup.layout, candidate)
    leanest = sorted(
        best.values(), key=lambda candidate: (candidate.memory.total, str(candidate.setup.layout))
    )[:BREADTH]
    return list({candidate.setup: candidate for candidate in (*train[:BREADTH], *leanest)}.values())


def _fit_sampler(problem: Problem, pair: Arrangement, trainer_memory: Memory) -> Setup | None:
    """Return the sampler's setup with as many sequences as its cache has room for; None where the pair does
    not fit."""
    bare = replace(pair, rollout=replace(pair.rollout, sequences=0))
    train, rollout = (
        bytes_of.memory(problem, bare, phase, trainer_memory) for phase in (Phase.TRAIN, Phase.ROLLOUT)
    )
    if margin(problem, train) < 0 or min(host_margin(problem, memory) for memory in (train, rollout)) < 0:
        return None
    free = margin(problem, rollout) + rollout.terms["KV cache"]
    sequences = sequences_for(problem, bare.rollout, free)
    return replace(bare.rollout, sequences=sequences) if sequences else None


def _describe_shortage(
    problem: Problem, train: Sequence[Candidate], rollout: Sequence[Candidate], base: Base
) -> str:
    """Describe by how much the nearest pair does not fit, with a cache for the longest sequence only."""
    lacks: list[tuple[float, str]] = []
    for trainer in train:
        for sampler in rollout:
            pair = Arrangement(train=trainer.setup, rollout=replace(sampler.setup, sequences=1), base=base)
            excess: dict[Phase, float] = {}
            for phase in (Phase.TRAIN, Phase.ROLLOUT):
                memory = bytes_of.memory(problem, pair, phase, trainer.memory)
                host = host_margin(problem, memory) / problem.cluster.per_node
                excess[phase] = -min(margin(problem, memory), host)
            phase = max(excess, key=lambda key: excess[key])
            lacks.append((excess[phase], f"{trainer.setup.layout} with {sampler.setup.layout} in {phase}"))
    if not lacks:
        name = "sampler" if train else "trainer"
        limits = " (one that shares has no p and no f)" if base == Base.SHARED and not train else ""
        return f"no {name} for it fits its GPUs even by itself{limits}"
    shortage, pair_name = min(lacks, key=lambda lack: lack[0])
    return f"{max(shortage, 0.0) / GB:.1f} GB a GPU too much at best, {pair_name}"


def _make_plan(problem: Problem, clock: Clock, arrangement: Arrangement) -> Plan | None:
    """Make the plan of an arrangement; None where it does not fit after all."""
    memory = {phase: bytes_of.memory(problem, arrangement, phase) for phase in Phase}
    if any(margin(problem, phase_memory) < 0 for phase_memory in memory.values()):
        return None
    return Plan(arrangement=arrangement, memory=memory, times=clock.step(problem, arrangement))


def describe_limit(problem: Problem, plan: Plan) -> str:
    """Describe what limits a plan: the phase and terms that fill the GPU, and the term of most seconds."""
    phase, times = plan.fullest(), plan.times
    memory = plan.memory[phase]
    terms = sorted(memory.terms, key=lambda term: -memory.terms[term])[:2]
    largest = " and ".join(f"{term} {memory.terms[term] / GB:.1f}" for term in terms)
    seconds, part, term = max(
        (s, part, term) for part, part_terms in times.terms.items() for term, s in part_terms.items()
    )
    share = seconds / max(times.total + times.overlapped, 1e-9)
    return (
        f"memory: {phase}, {memory.total / GB:.1f} of {limit(problem) / GB:.1f} GB ({largest}); "
        f"time: {part} {term}, {seconds:.1f} s ({share:.0%} of a step)"
    )


def why_lost(winner: Plan, other: Plan) -> str:
    """Describe in a sentence by how much another plan is slower, and the term of most of the difference.
    Plans that Ostinato can start come first, so one that it cannot may be faster."""
    excess = other.times.total / max(winner.times.total, 1e-9) - 1
    if abs(excess) < 0.0005:
        return "as fast, within 0.05%"
    if excess < 0:
        return f"{-excess:.1%} faster, but Ostinato cannot start it yet"
    fast, slow = (
        Counter({(part, term): s for part, terms in plan.times.terms.items() for term, s in terms.items()})
        for plan in (winner, other)
    )
    worst = max(sorted(fast | slow), key=lambda key: slow[key] - fast[key])
    return f"{excess:.1%} slower: {' '.join(worst)} takes {slow[worst]:.1f} s instead of {fast[worst]:.1f} s"


def distinct(plans: Iterable[Plan], number: int) -> list[Plan]:
    """Return the first plans that differ in layouts, base or placement."""
    best: dict[tuple[Layout, Layout, Base, Placement], Plan] = {}
    for plan in plans:
        a = plan.arrangement
        best.setdefault((a.train.layout, a.rollout.layout, a.base, a.placement), plan)
    return list(best.values())[:number]
