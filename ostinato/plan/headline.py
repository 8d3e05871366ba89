"""docs/kimi-k2.md: LoRA RL of Kimi K2 on 64 GPUs of 80 GB, computed; always the same bytes.

Data sheets and formulas only: no measured efficiency enters, nothing of the machine that it is written on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.parallel.layout import Layout
from ostinato.plan.cluster import parse_cluster
from ostinato.plan.counts import ExpertForm, adapter_counts, counts, expert_adapter_unit, kv_values
from ostinato.plan.leaves import gradient_messages
from ostinato.plan.lengths import lognormal_lengths
from ostinato.plan.memory import margin, weight_bytes
from ostinato.plan.named import find_model
from ostinato.plan.parts import stage_elements
from ostinato.plan.problem import (
    GB,
    Arrangement,
    Base,
    Clock,
    DType,
    Phase,
    Precision,
    Problem,
    Recompute,
    Setup,
    Work,
)
from ostinato.plan.search import Allowed, Found, Plan, binding, fits, resized, search, sizes, why_lost
from ostinato.plan.time import Roofline, refit_bytes
from ostinato.plan.words import UNMAPPED, question

CLUSTER = "64xH800-80"
CLAIMED = 0.10  # of the GPUs of full-parameter RL, by the article of 2025-12-07
OPEN_RECIPE = 256  # GPUs of an open full-parameter recipe, its optimizer in host memory (slime)
LAYOUTS = (
    ("TP8 PP8 EP8", "t8p8e8"),
    ("TP8 PP4 EP16", "d2t8p4e16"),
    ("TP4 PP8 EP8", "d2t4p8e8"),
    ("TP2 PP4 EP16", "d8t2p4e16"),
    ("TP1 PP8 EP8", "d8p8e8"),
    ("TP8 PP2 EP32", "d4t8p2e32"),
    ("TP8 PP1 EP64", "d8t8e64"),
    ("TP1 PP1 EP64", "d64e64"),
)
SMALL = AdapterSpec(rank=32, alpha=64.0)
LARGE = AdapterSpec(rank=128, alpha=256.0)
EACH = AdapterSpec(rank=128, alpha=256.0, expert_scheme=ExpertScheme.PER_EXPERT)


def problem(
    adapter: AdapterSpec | None = SMALL, base: DType = DType.BF16, sampler: DType | None = None
) -> Problem:
    """The question of the document."""
    return Problem(
        model=find_model("kimi-k2"),
        adapter=adapter,
        precision=Precision(base=base, sampler=sampler or base),
        work=Work(answers=lognormal_lengths(4096, 16384)),
        cluster=parse_cluster(CLUSTER),
    )


def headline(clock: Clock | None = None) -> str:
    """The document."""
    clock = clock or Roofline()
    cases = {
        "BF16, LoRA r=32 shared-outer": problem(),
        "BF16, LoRA r=128 shared-outer": problem(LARGE),
        "BF16, LoRA r=128 per expert": problem(EACH),
        "BF16 trainer, FP8 sampler, r=32": problem(sampler=DType.FP8),
        "FP8 both, LoRA r=32 shared-outer": problem(base=DType.FP8),
    }
    found = {name: search(case, clock) for name, case in cases.items()}
    parts = [
        _head(),
        _asked(problem()),
        _counted(),
        _weights(),
        _fits(cases, found),
        _first(problem(), found["BF16, LoRA r=32 shared-outer"]),
        _traffic(),
        _fewest(),
    ]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _head() -> str:
    return """# Kimi K2, LoRA RL on 64 GPUs of 80 GB

Written by `ostinato plan headline --out docs/kimi-k2.md`, which always writes the same bytes; a test does so
and compares. All figures are computed from the model's config.json, the decoder's own shapes and data
sheets; none was measured on such a cluster. Weights, adapters, gradients and optimizer are exact, activations
and times are estimates (`docs/planner.md` says how far off where it was measured). GB is 10^9 bytes; a card
of 80 GB shows up to 7 % more, which is margin. Layouts are written as in `ostinato/parallel/layout.py`:
d data, t tensor, p pipeline, c context, e expert, x expert tensor, v virtual stages, f pieces."""


def _asked(case: Problem) -> str:
    rows = [(name, value) for name, value in question(case).items()]
    return "## What is asked\n\n" + _table(("", ""), rows)


def _counted() -> str:
    case = problem()
    config, found = case.config, counts(case.config)
    rows = [(str(role), f"{number:,}") for role, number in found.roles.items()]
    rows += [
        ("all", f"{found.total:,}"),
        ("active per token", f"{found.active:,}"),
        ("active without the embedding", f"{found.active_without_embedding:,}"),
    ]
    ours = [
        (f"r={spec.rank}, {scheme}", f"{sum(adapter_counts(config, spec).values()):,}")
        for scheme, specs in {"shared-outer": (SMALL, LARGE), "per expert": (EACH,)}.items()
        for spec in specs
    ]
    forms = [(str(form), f"{expert_adapter_unit(config, form, 32):,}") for form in ExpertForm]
    kv = kv_values(config, latent=True) * 2
    return "\n\n".join(
        [
            "## Parameters",
            _table(("part", "parameters"), rows),
            "Our adapters, on attention (all five projections), dense and shared MLP and experts:",
            _table(("adapter", "parameters"), ours),
            "On routed experts alone, per unit of rank (32 expert ranks for the form that depends on them):",
            _table(("form", "parameters"), forms),
            f"Cache per token: {kv:,.0f} bytes as latents in BF16, not cut by tensor ranks.",
        ]
    )


def _weights() -> str:
    config = problem().config
    rows = []
    for name, text in LAYOUTS:
        layout = Layout.parse(text)
        stages = [stage_elements(config, None, layout, stage) for stage in range(layout.pipeline)]
        sizes = [
            max(weight_bytes(one, dtype) for one in stages) / GB
            for dtype in (DType.BF16, DType.FP8, DType.INT4)
        ]
        rows.append((name, f"`{layout}`", *(f"{size:.1f}" for size in sizes)))
    return "\n\n".join(
        [
            "## Base weights of the fullest GPU, GB",
            _table(("layout", "ours", "BF16", "FP8", "INT4"), rows),
            "FP8 and INT4 are of linear maps, scales included; embedding, head, routers and norms stay BF16.",
        ]
    )


def _best(found: Found, base: Base) -> Plan | None:
    return next((plan for plan in found.plans if plan.arrangement.base == base), None)


def _fits(cases: dict[str, Problem], found: dict[str, Found]) -> str:
    rows = []
    for name, case in cases.items():
        one = found[name]
        for base in Base:
            plan = _best(one, base)
            if plan is None:
                rows.append((name, str(base), "no", one.reasons.get(base, ""), "", "", "", ""))
                continue
            a, full = plan.arrangement, plan.memory[plan.fullest()]
            rows.append(
                (
                    name,
                    f"{base}{', adapters asleep' if a.slept else ''}",
                    f"`{a.train.layout}`, {a.train.microbatch:,} rows, recompute {a.train.recompute}",
                    f"`{a.rollout.layout}`, {a.rollout.sequences} sequences",
                    str(plan.fullest()),
                    f"{full.total / GB:.1f}",
                    f"{margin(case, full) / GB:.1f}",
                    f"{plan.times.total:,.0f}",
                )
            )
    tried = [
        f"{name}: {one.tried[Phase.TRAIN]:,} setups of the trainer were looked at"
        for name, one in found.items()
    ]
    return "\n\n".join(
        [
            "## What fits on 64 GPUs",
            "The fastest that fits, by how the base is held: shared (one copy, read by both), two copies, or "
            f"swapped (each phase's copy comes from host memory). {UNMAPPED}. Seconds "
            "of one RL step, from data sheets.",
            _table(("case", "base", "trainer", "sampler", "fullest in", "GB", "left", "s"), rows),
            f"{tried[0]}.",
        ]
    )


def _first(case: Problem, found: Found) -> str:
    plan = found.plans[0]
    names = dict.fromkeys(name for one in plan.memory.values() for name in one.terms)
    rows = [
        (name, *(f"{one.terms.get(name, 0.0) / GB:.2f}" for one in plan.memory.values()))
        for name in names
        if any(one.terms.get(name, 0.0) >= 0.005 * GB for one in plan.memory.values())
    ]
    rows.append(("all", *(f"{one.total / GB:.2f}" for one in plan.memory.values())))
    a = plan.arrangement
    times = [
        (
            part,
            ", ".join(
                f"{term} {s:.1f}" for term, s in sorted(terms.items(), key=lambda one: -one[1]) if s >= 0.05
            ),
        )
        for part, terms in plan.times.terms.items()
        if terms
    ]
    return "\n\n".join(
        [
            "## The fastest at BF16, r=32",
            f"Trainer `{a.train.layout}`, sampler `{a.rollout.layout}`, base {a.base}; "
            f"{binding(case, plan)}.",
            _table(("GB on the fullest GPU", *(str(phase) for phase in plan.memory)), rows),
            _table(("seconds", "by term"), times),
            _lost(found),
        ]
    )


def _lost(found: Found) -> str:
    rows = []
    for base in Base:
        plan = _best(found, base)
        if plan is not None and plan is not found.plans[0]:
            rows.append(
                f"- {base} (`{plan.arrangement.train.layout}`, `{plan.arrangement.rollout.layout}`): "
                f"{why_lost(found.plans[0], plan)}"
            )
    return "Others:\n\n" + "\n".join(rows) if rows else "No other way to hold the base fits."


def _traffic() -> str:
    """Gradients and refit of adapters against those of all parameters, in one layout."""
    layout = Layout.parse("d8t8e64")
    setup = Setup(layout=layout, microbatch=17408, recompute=Recompute.FULL)
    rows, sent = [], {}
    for name, case in {
        "all parameters": problem(None),
        "LoRA r=128 shared-outer": problem(LARGE),
        "LoRA r=32 shared-outer": problem(),
    }.items():
        messages = gradient_messages(case.config, case.adapter, layout, 0, case.precision.gradient.num_bytes)
        arrangement = Arrangement(train=setup, logprobs=setup, rollout=setup, base=Base.TWO)
        sent[name] = (sum(one.calls * one.sent for one in messages), refit_bytes(case, arrangement))
        gradients, refit = sent[name]
        shares = (part / whole for part, whole in zip(sent[name], sent["all parameters"], strict=True))
        told = [f"{share:.2%}" for share in shares]
        rows.append((name, f"{gradients / GB:.2f}", told[0], f"{refit / GB:.1f}", told[1]))
    return "\n\n".join(
        [
            "## Gradients and refit",
            f"GB that one rank of `{layout}` sends to sum gradients, once per optimizer step, and GB of a "
            "publish to the sampler; both as shares of those of all parameters.",
            _table(("trained", "gradients", "share", "refit", "share"), rows),
            "The exchanges of rows between experts are the same for all of them.",
        ]
    )


def number(case: Problem, allowed: Allowed) -> int | None:
    """GPUs of the smallest cluster on which anything fits."""
    for tried in sizes(case.cluster.per_node, 1024):
        if fits(replace(case, cluster=resized(case.cluster, tried)), allowed):
            return tried
    return None


def _fewest() -> str:
    rows: list[tuple[str, ...]] = []
    small: dict[str, list[int | None]] = {}  # by base, in their order
    for name, case in {
        "LoRA r=32, BF16": problem(),
        "LoRA r=32, FP8 both": problem(base=DType.FP8),
        "LoRA r=32, INT4 both": problem(base=DType.INT4),
    }.items():
        small[name] = [number(case, Allowed(bases=(base,))) for base in Base]
        rows.append((name, *(str(one or "none up to 1024") for one in small[name])))
    full, least = problem(None), []
    state = 18 * counts(full.config).total
    for name, host in {"BF16 with FP32 master": False, "optimizer in host memory": True}.items():
        found = [
            number(full, Allowed(bases=(base,), optimizer_on_host=host)) for base in (Base.TWO, Base.SWAPPED)
        ]
        least.append(_least(found))
        rows.append((f"all parameters, {name}", "-", *(str(one or "none up to 1024") for one in found)))
    return "\n\n".join(
        [
            "## The smallest cluster that fits",
            _table(("GPUs of 80 GB", *(str(base) for base in Base)), rows),
            f"{UNMAPPED}. Swapped needs a trainer and a sampler that wait in host "
            "memory, which verl has and Ostinato has not; Ostinato holds the base in BF16 or FP32.",
            _ratio(small, least, state),
        ]
    )


def _least(found: Sequence[int | None]) -> int | None:
    return min((one for one in found if one), default=None)


def _ratio(small: dict[str, list[int | None]], full: Sequence[int | None], state: int) -> str:
    ours = {
        f"{name}{how} ({_least(found[first:])})": _least(found[first:])
        for name, found in {"BF16": small["LoRA r=32, BF16"], "FP8": small["LoRA r=32, FP8 both"]}.items()
        for how, first in ((", any base", 0), (", not shared", 1))
    } | {"the 64 of the claim": 64}
    others = {
        f"all parameters, everything on GPUs ({full[0]})": full[0],
        f"all parameters, optimizer on the host ({full[1]})": full[1],
        f"an open recipe, optimizer on the host ({OPEN_RECIPE})": OPEN_RECIPE,
    }
    rows = [
        (name, *(f"{one / other:.0%}" if one and other else "-" for one in ours.values()))
        for name, other in others.items()
    ]
    return "\n\n".join(
        [
            "## Next to the claimed 10 %",
            f"The claim is {CLAIMED:.0%} of the GPUs of full-parameter RL, so 64 against 640; how it was "
            "computed is not stated. State of full-parameter training is 18 bytes a parameter (weight 2, "
            f"gradient 4, master 4, moments 8): {state / 1e12:.1f} TB. The ratio is of memory, not of "
            "arithmetic: LoRA spares the gradients of weights, a fifth to a quarter of a step, and none of "
            "the exchanges of rows between experts. Fits means every term of `docs/planner.md` at its "
            "fullest GPU, the longest sequence in one microbatch, and host memory as above.",
            _table(("GPUs, relative to", *ours), rows),
        ]
    )


__all__ = ["headline", "problem"]
