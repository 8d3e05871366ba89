"""What an engine makes of a layout: which it has, where experts are cut, who gets which answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_world import arrangement, problem, setup

from ostinato.parallel.layout import Layout
from ostinato.plan.engines import engine_layout, refuse
from ostinato.plan.layouts import layouts
from ostinato.plan.memory import mapped, tokens_in_flight
from ostinato.plan.parts import stage_elements
from ostinato.plan.problem import DType, Phase, Precision, Problem, Sampler, Work
from ostinato.plan.roofline import Efficiency
from ostinato.plan.sampling import _Pass, rollout_seconds

VLLM, LOCAL = Sampler(), Sampler(name="local", latent_kv=False)


def of(text: str) -> Layout:
    return Layout.parse(text)


def local(one: Problem) -> Problem:
    return replace(one, sampler=LOCAL)


# ---- which layouts


def test_vllm_spreads_experts_over_whole_engines_or_cuts_their_width() -> None:
    found = {str(one) for one in layouts(problem(gpus="8xH100-80"), 8, Phase.ROLLOUT)}
    assert {"d8", "d8e8", "d2t4", "d2t4e4", "d2t4e8", "d4t2e8", "d4t2e4"} <= found
    assert not {"d2t4e2", "d2t4e2x4", "d2t4x4", "d2t4e4x4"} & found


@pytest.mark.parametrize(
    ("sampler", "text", "words"),
    [
        (VLLM, "d4p2", "has p2, but vllm samples without it"),
        (VLLM, "d4c2", "has c2"),
        (VLLM, "d4f2", "has f2"),
        (VLLM, "t4e2", "over all ranks of an engine or none"),
        (VLLM, "d2t4e2x4", "x4, which vLLM does not take"),
        (LOCAL, "t2", "cuts a model that the local engine has whole; use d alone"),
        (LOCAL, "p2", "has p2, but local samples without it"),
    ],
)
def test_what_an_engine_has_not_is_refused(sampler: Sampler, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        refuse(sampler, problem().config, of(text))
    assert "\n" not in str(caught.value)


def test_a_server_is_those_ranks_that_share_experts() -> None:
    moe, dense = problem().config, problem("qwen3-8b").config
    assert engine_layout(moe, of("d8t2e8")) == (of("d4t2e8"), 2)
    assert engine_layout(moe, of("d8t2e16")) == (of("d8t2e16"), 1)
    assert engine_layout(moe, of("d8t2")) == (of("t2"), 8)
    assert engine_layout(dense, of("d8t2")) == (of("d8t2"), 1)


# ---- bytes


def test_a_group_over_several_replicas_has_its_prompt_in_each() -> None:
    work = Work(prompts=4, group=8, prompt_tokens=1000, answers=(100,))
    said = tokens_in_flight(replace(work, prompt_tokens=0))
    assert tokens_in_flight(work) == tokens_in_flight(work, 4) == said + 1000 / 8
    assert tokens_in_flight(work, 8) == said + 1000 / 4  # four answers of a group on each
    assert tokens_in_flight(work, 64) == said + 1000  # one answer at most
    few, many = (
        rollout_seconds(problem(gpus=f"{n}xH100-80", work=work), setup(f"d{n}"), Efficiency())["prefill"]
        for n in (4, 8)
    )
    assert few == many


def test_a_step_of_decoding_reads_what_is_kept() -> None:
    """Head, routers and norms stay in BF16, whatever the linear maps are in; adapters are those of a rank."""
    one = problem("kimi-k2", "64xH800-80", precision=Precision(sampler=DType.INT4))
    layout = of("d8t8e64")
    elements = stage_elements(one.config, one.adapter, layout, 0)
    step = _Pass(problem=one, layout=layout, efficiency=Efficiency())
    dense, experts = step.weights()
    assert experts == elements.experts * DType.INT4.num_bytes
    plain = 2 * (elements.routers + elements.vectors + elements.ends / 2) + 4 * elements.untrained
    assert dense == pytest.approx(elements.matrices * DType.INT4.num_bytes + plain)
    assert step._adapter_bytes() == 2 * elements.adapters


# ---- one base


def test_one_copy_is_mapped_by_the_local_engine_in_the_process_that_trains() -> None:
    cpu, one, four = problem(gpus="1xcpu"), arrangement("1", "1"), arrangement("d4e4", "d4")
    assert mapped(local(cpu), one.train, one.rollout)
    assert not mapped(cpu, one.train, one.rollout)
    assert not mapped(local(problem(gpus="4xcpu")), four.train, four.rollout)
