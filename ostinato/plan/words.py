"""A problem in words: everything that a plan depends on, defaults as well."""

from __future__ import annotations

from ostinato.plan.counts import adapter_counts, counts, kv_values
from ostinato.plan.memory import mapped
from ostinato.plan.problem import GB, Arrangement, Base, Placement, Problem

UNMAPPED = (
    "A shared base needs an engine that maps the tensors of the trainer: vLLM does not; Ostinato's own does, "
    "where one process trains and samples"
)


def needs_mapping(problem: Problem, a: Arrangement) -> bool:
    """Is it a plan with one copy of the base that no engine holds so today?"""
    shared = a.base == Base.SHARED and a.placement == Placement.COLOCATED
    return shared and not mapped(problem, a.train, a.rollout)


def question(problem: Problem) -> dict[str, str]:
    """Everything that a plan depends on, defaults as well, in words."""
    work, precision, cluster, found = problem.work, problem.precision, problem.cluster, counts(problem.config)
    gpu, kv = (
        cluster.gpu,
        kv_values(problem.config, latent=problem.sampler.latent_kv) * precision.kv.num_bytes,
    )
    loads = problem.imbalance.loads
    return {
        "model": f"{problem.model.name}: {found.total / 1e9:,.2f}B parameters, "
        f"{found.active / 1e9:,.2f}B active",
        "trained": _trained(problem),
        "precision": f"base {precision.base}, sampler {precision.sampler}, compute {precision.compute}, "
        f"gradients {precision.gradient}, master {precision.master}, moments {precision.moments}",
        "work": f"{work.prompts} prompts x {work.group} answers, prompt {work.prompt_tokens}, answers mean "
        f"{work.mean_answer:,.0f} up to {work.max_answer:,} tokens, {work.updates} optimizer steps",
        "cluster": f"{cluster.nodes} x {cluster.per_node} {gpu.name}, host "
        f"{cluster.host_memory / GB:,.0f} GB a node; per GPU and direction "
        f"{gpu.link / GB:g} GB/s in the node, {gpu.nic / GB:g} between nodes",
        "sampler": f"{problem.sampler.name}, cache {kv / 1e3:,.1f} kB a token, "
        f"up to {problem.sampler.sequences} sequences a replica",
        "reserve": f"context and NCCL {problem.reserve.context / GB:g} GB, "
        f"fragmentation {problem.reserve.fragmentation:.0%} of activations",
        "imbalance": "measured loads" if loads else f"lognormal popularity, sigma {problem.imbalance.sigma}",
        "price": f"{gpu.price:g} per GPU and hour, assumed; {work.steps:,} steps",
    }


def _trained(problem: Problem) -> str:
    spec = problem.adapter
    if spec is None:
        return "all parameters"
    number = sum(adapter_counts(problem.config, spec).values())
    scheme = f", experts {spec.expert_scheme}" if problem.config.moe else ""
    return f"LoRA r={spec.rank} on {', '.join(spec.targets)}{scheme}: {number / 1e6:,.1f}M parameters"


__all__ = ["UNMAPPED", "needs_mapping", "question"]
