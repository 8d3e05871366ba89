"""Log-probabilities of a head in chunks and parts, and over what top-k, top-p and min-p had kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from worlds import KERNELS, answers, tiny_decoder

from ostinato.algo.algorithms import algorithm
from ostinato.algo.logprobs import Vocabulary, chunked_logprobs, linear_logprobs
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.model.decoder import Decoder
from ostinato.model.lora import init_adapters
from ostinato.model.native import Kernels
from ostinato.model.shapes import AdapterSpec
from ostinato.rollout.convert import make_samples
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch, Group, Prompt, Request, Sample, Sampling, Stop, Support, Trajectory, Turn


def problem(rows: int = 7, dim: int = 5, vocab: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=torch.float64, generator=generator)
    return hidden, weight, torch.randint(vocab, (rows,), generator=generator)


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, support: Support | None = None
) -> tuple[Tensor, Tensor]:
    """Row by row, on the logits of its support alone."""
    logprobs, entropy = [], []
    for row, kept in enumerate((support or Support.whole(len(targets))).split(1)):
        ids = torch.from_numpy(kept.ids).long() if len(kept.ids) else torch.arange(len(weight))
        log_p = torch.log_softmax(hidden[row] @ weight[ids].T / temperature, dim=-1)
        logprobs.append(log_p[ids == targets[row]].squeeze(0))
        entropy.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropy)


def support_of(targets: Tensor, vocab: int, seed: int, share: float = 0.7) -> Support:
    """For ``share`` of the rows some ids with the target among them, at least itself."""
    rng = np.random.default_rng(seed)
    kept = [
        np.union1d(rng.integers(0, vocab, rng.integers(0, vocab)), [target])
        if rng.random() < share
        else np.empty(0)
        for target in targets.tolist()
    ]
    return Support.of([ids.astype(np.int32) for ids in kept])


@given(
    st.integers(1, 9), st.sampled_from([0.5, 1.0, 1.7]), st.integers(0, 999), st.sampled_from([0.0, 0.7, 1.0])
)
def test_both_equal_the_naive_computation(chunk: int, temperature: float, seed: int, share: float) -> None:
    """Some rows, or all, or none with a support; supports of one id, whose only token is certain, too."""
    hidden, weight, targets = problem()
    compare(hidden, weight, targets, chunk, temperature, support_of(targets, len(weight), seed, share))


def test_nothing_outside_of_a_support_has_any_influence() -> None:
    """Not even a logit of 1e30; the gradient to the weight is zero there to the last bit."""
    hidden, weight, targets = problem()
    drawn_from = support_of(targets, len(weight), seed=1, share=1.0)
    gone = int(np.setdiff1d(np.arange(len(weight)), targets.numpy())[0])  # from all supports
    kept = [piece.ids[piece.ids != gone] for piece in drawn_from.split(1)]
    support, loud = Support.of(kept), weight.clone()
    loud[gone] *= 1e30
    for one, other in zip(
        linear_logprobs(hidden, weight, targets, support=support),
        linear_logprobs(hidden, loud, targets, support=support),
        strict=True,
    ):
        assert torch.equal(one, other)
    weight.requires_grad_()
    logprobs, entropy = chunked_logprobs(hidden, targets, lambda h: h @ weight.T, support=support)
    (slope,) = torch.autograd.grad((logprobs + entropy).sum(), weight)
    assert (slope[gone] == 0).all() and (slope != 0).any()


def test_rows_without_a_support_are_scored_as_ever_bit_for_bit() -> None:
    hidden, weight, targets = (x.float() if x.is_floating_point() else x for x in problem(rows=40))
    for chunk in (7, 40):
        plain = linear_logprobs(hidden, weight, targets, chunk=chunk)
        whole = linear_logprobs(hidden, weight, targets, chunk=chunk, support=Support.whole(40))
        some = support_of(targets, len(weight), seed=2, share=0.5)
        mixed = linear_logprobs(hidden, weight, targets, chunk=chunk, support=some)
        free = torch.from_numpy(some.counts == 0)
        for a, b, c in zip(plain, whole, mixed, strict=True):
            assert torch.equal(a, b) and torch.equal(a[free], c[free]) and not torch.equal(a, c)


def test_rows_are_scored_in_tiles_that_fit_the_cache() -> None:
    """50,000 fp64 logits are 0.4 MB: two rows to a tile, and a last tile of one."""
    hidden, weight, targets = problem(rows=5, dim=2, vocab=50_000)
    compare(hidden, weight, targets, chunk=5, temperature=1.0)
    compare(hidden, weight, targets, 5, 1.0, support_of(targets, 50_000, seed=3))


def compare(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    temperature: float,
    support: Support | None = None,
) -> None:
    probe = torch.randn(2, len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {"temperature": temperature, "chunk": chunk, "support": support}
    results = [
        naive(hidden, weight, targets, temperature, support),
        chunked_logprobs(hidden, targets, lambda h: h @ weight.T, **options),
        linear_logprobs(hidden, weight, targets, entropy_grad=True, **options),
    ]
    grads = [torch.autograd.grad((torch.stack(r) * probe).sum(), hidden)[0] for r in results]
    for result, grad in zip(results[1:], grads[1:], strict=True):
        torch.testing.assert_close(torch.stack(result), torch.stack(results[0]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, grads[0], rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, targets = problem(rows=4, vocab=6)
    options = {"temperature": 0.7, "chunk": 3, "support": support_of(targets, 6, seed=4, share=0.6)}
    assert torch.autograd.gradcheck(
        lambda h: linear_logprobs(h, weight, targets, entropy_grad=True, **options), (hidden,)
    )
    weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_logprobs(h, targets, lambda x: x @ w.T, **options), (hidden, weight)
    )


def test_entropy_is_detached_unless_asked_for_and_nan_unless_wanted() -> None:
    hidden, weight, targets = problem()
    assert not linear_logprobs(hidden, weight, targets)[1].requires_grad
    for _, entropy in (
        linear_logprobs(hidden, weight, targets, want_entropy=False),
        chunked_logprobs(hidden, targets, lambda h: h @ weight.T, want_entropy=False),
    ):
        assert entropy.isnan().all()
    with torch.no_grad():
        for logprobs, _ in (
            linear_logprobs(hidden, weight, targets),
            chunked_logprobs(hidden, targets, lambda h: h @ weight.T),
        ):
            assert not logprobs.requires_grad


def test_bf16_inputs_are_scored_in_fp32_and_the_gradient_returns_in_bf16() -> None:
    hidden, weight, targets = problem()
    low = hidden.detach().bfloat16().requires_grad_()
    logprobs, entropy = linear_logprobs(low, weight.bfloat16(), targets)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    exact = naive(low.detach().double(), weight.bfloat16().double(), targets, 1.0)[0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-6)
    logprobs.sum().backward()
    assert low.grad is not None and low.grad.dtype == torch.bfloat16


def test_near_certain_token_keeps_its_gradient_through_a_bf16_kernel() -> None:
    """The story: p = 1 - 1e-5 rounds to 1 in bf16, so weight[target] - p @ weight would lose everything.

    The product is therefore taken of (onehot - p), whose entries keep their relative precision in bf16.
    """
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight, targets = torch.tensor([[11.512925], [0.0]]), torch.tensor([0])
    kernels = {
        "matmul_nt": lambda x, w: x @ w.T,
        "matmul_nn": lambda dy, w: (dy.bfloat16() @ w.bfloat16()).float(),
    }
    linear_logprobs(hidden, weight, targets, **kernels)[0].sum().backward()
    assert hidden.grad is not None
    assert float(hidden.grad) == pytest.approx(11.512925e-5, rel=0.02)


def test_never_more_logits_than_a_chunk() -> None:
    hidden, weight, targets = problem()
    sizes: list[int] = []

    def matmul_nt(x: Tensor, w: Tensor) -> Tensor:
        sizes.append(len(x))
        return x @ w.T

    linear_logprobs(hidden, weight, targets, chunk=3, matmul_nt=matmul_nt, matmul_nn=torch.mm)[
        0
    ].sum().backward()
    assert sizes == [3, 3, 1]  # and backward computes none
    sizes.clear()
    chunked_logprobs(hidden, targets, lambda h: matmul_nt(h, weight), chunk=3)[0].sum().backward()
    assert sizes[:3] == [3, 3, 1] and max(sizes) == 3


def test_refusals() -> None:
    hidden, weight, targets = problem()
    other = np.array([(int(targets[2]) + 1) % 11], np.int32)
    stranger = Support(counts=(np.arange(7) == 2).astype(np.int32), ids=other)
    cases = [
        ({"targets": targets[:3]}, "targets has 3 entries for 7 rows"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"support": Support.whole(3)}, "support has 3 entries for 7 targets"),
        ({"support": stranger}, f"target {int(targets[2])} of row 2 is not in its support"),
        ({"weight": weight.clone().requires_grad_()}, "use chunked_logprobs"),
        ({"entropy_grad": True, "want_entropy": False}, "want_entropy is False"),
        ({"matmul_nn": torch.mm}, "give both or neither"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            linear_logprobs(**{"hidden": hidden, "weight": weight, "targets": targets, **change})


# a vocabulary in parts; the parts are threads that meet in every sum and maximum, as ranks do


class Meeting:
    """What ``n`` threads bring to a call, reduced and given to all of them."""

    def __init__(self, n: int) -> None:
        self._barrier, self._brought = threading.Barrier(n, timeout=20), [torch.empty(0)] * n
        self.calls = 0

    def vocabulary(self, part: int, start: int, size: int) -> Vocabulary:
        def over(reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def call(x: Tensor) -> Tensor:
                self._brought[part] = x.clone()
                if self._barrier.wait() == 0:
                    self.calls += 1
                self._barrier.wait()
                found = reduce(torch.stack(self._brought))
                self._barrier.wait()
                return found

            return call

        return Vocabulary(start=start, size=size, sum=over(lambda x: x.sum(0)), max=over(lambda x: x.amax(0)))


def in_parts(sizes: list[int], run: Callable[[int, Vocabulary], Any]) -> tuple[list[Any], int]:
    """(what ``run`` gives for each part, how often they met)."""
    meeting = Meeting(len(sizes))
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    parts = [meeting.vocabulary(n, starts[n], size) for n, size in enumerate(sizes)]
    with ThreadPoolExecutor(len(sizes)) as pool:
        return [*pool.map(run, range(len(sizes)), parts)], meeting.calls


@pytest.mark.slow
@given(
    st.sampled_from([[11], [6, 5], [1, 10], [3, 4, 4]]),
    st.integers(1, 9),
    st.sampled_from([0.5, 1.0]),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_parts_add_up_to_the_whole(
    sizes: list[int], chunk: int, temperature: float, seed: int, share: float
) -> None:
    """Values are those of the whole in every part, gradients of hidden states sum to the whole's, and
    those of a part's weight are its rows."""
    hidden, weight, targets = problem()
    support = support_of(targets, len(weight), seed, share)
    probe = torch.randn(2, len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {"temperature": temperature, "chunk": chunk, "support": support}

    def gradients(
        head: Tensor, vocabulary: Vocabulary | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        own, trained = hidden.detach().clone().requires_grad_(), head.clone().requires_grad_()
        frozen = linear_logprobs(own, head, targets, entropy_grad=True, vocabulary=vocabulary, **options)
        free = chunked_logprobs(own, targets, lambda h: h @ trained.T, vocabulary=vocabulary, **options)
        slopes = torch.autograd.grad((torch.stack(frozen) * probe).sum(), own)
        slopes += torch.autograd.grad((torch.stack(free) * probe).sum(), (own, trained))
        return [torch.stack(frozen), torch.stack(free)], list(slopes[:2]), [slopes[2]]

    values, slopes, (weight_slope,) = gradients(weight, None)
    cuts = weight.split(sizes)
    found, _ = in_parts(sizes, lambda part, vocabulary: gradients(cuts[part], vocabulary))
    for part, (own_values, _, _) in enumerate(found):
        for one, other in zip(own_values, values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"part {part}")
    for which, slope in enumerate(slopes):
        total = sum(own_slopes[which] for _, own_slopes, _ in found)
        torch.testing.assert_close(total, slope, rtol=1e-11, atol=1e-12)
    joined = torch.cat([own_weight for _, _, (own_weight,) in found])
    torch.testing.assert_close(joined, weight_slope, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("want_entropy", [False, True])
def test_a_chunk_is_two_exchanges(want_entropy: bool) -> None:
    hidden, weight, targets = problem(rows=7)
    cuts = weight.split(6)

    def run(part: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        return linear_logprobs(
            hidden.detach(), cuts[part], targets, chunk=3, want_entropy=want_entropy, vocabulary=vocabulary
        )

    found, calls = in_parts([6, 5], run)
    assert calls == 2 * 3
    whole = linear_logprobs(hidden.detach(), weight, targets)
    for logprobs, entropy in found:
        torch.testing.assert_close(logprobs, whole[0], rtol=1e-12, atol=1e-12)
        assert entropy.isnan().all() if not want_entropy else not entropy.isnan().any()


def test_a_near_certain_token_keeps_its_gradient() -> None:
    """1 - p by expm1 where the target is, also if that is another part."""
    hidden = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [40.0]], dtype=torch.float64)

    def slope(part: int, vocabulary: Vocabulary) -> Tensor:
        own = hidden.detach().clone().requires_grad_()
        logprobs, _ = linear_logprobs(
            own, weight[part : part + 1], torch.tensor([1]), vocabulary=vocabulary, support=Support.whole(1)
        )
        return torch.autograd.grad(logprobs.sum(), own)[0]

    found, _ = in_parts([1, 1], slope)
    assert float(sum(found)) == pytest.approx(40 * float(torch.exp(torch.tensor(-40.0, dtype=torch.float64))))


# ---- the sampler's action space is the trainer's: what top-k, top-p and min-p kept, from draw to gradient


GAP = "sampling/sampling_logp_difference/max"
FILTERS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def decoder_of() -> Decoder:
    return tiny_decoder(head_dim=8)


def played(decoder: Decoder, sampling: Sampling, kernels: Kernels | None = None) -> list[Sample]:
    """Three prompts with three siblings each, as the engine answers them and as they are converted."""
    engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=4, context_limit=128)
    rng, made = np.random.default_rng(3), []
    prompts = [rng.integers(0, 61, 5 + n).astype(np.int32) for n in range(3)]
    requests = [Request(tokens=prompts[n // 3], sampling=sampling, seed=(5, n)) for n in range(9)]
    done = [
        Trajectory(turns=(Turn(context=request.tokens, completion=one),), stop=Stop.LENGTH, seed=request.seed)
        for request, one in zip(requests, answers(engine, requests), strict=True)
    ]
    for g in range(3):
        group = Group(
            prompt=Prompt(uid=str(g), text="?"), trajectories=tuple(done[3 * g : 3 * g + 3]), step=1
        )
        made += make_samples(group, g, np.array([1.0, -0.5, -0.5]))
    return made


def gap(decoder: Decoder, batch: Batch, temperature: float, *, full: bool = False) -> dict[str, float]:
    """What a step measures; its update is next to nothing."""
    adapters = None if full else init_adapters(decoder.config, AdapterSpec(rank=2), 0)
    decoder.set_trainable(full)
    trainer = PolicyTrainer(
        decoder, adapters, algorithm("grpo"), settings=TrainerSection(lr=1e-12), temperature=temperature
    )
    return dict(trainer.step(batch).metrics)


def without_support(batch: Batch) -> Batch:
    return replace(batch, microbatches=tuple(replace(one, support=None) for one in batch.microbatches))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_sampler_and_trainer_agree_to_rounding(filters: str, kernels: Kernels | None) -> None:
    """At equal weights, on a mixture of experts with its routes replayed. Scored over the whole vocabulary
    the same tokens look off-policy, which was our account of every truncated run before supports."""
    decoder = decoder_of()
    sampling = Sampling(max_tokens=12, temperature=0.8, **FILTERS[filters])
    mine = played(decoder, sampling, kernels)
    batch = pack(mine, aggregation_weights(mine, Aggregation.TOKEN), tokens_per_microbatch=40)
    seen = gap(decoder, batch, 0.8)
    assert seen[GAP] < 2e-5
    assert 1 < seen["sampling/support_mean"] < 61
    counts = np.concatenate([one.support.counts for one in batch.microbatches if one.support is not None])
    assert seen["sampling/support_mean"] == pytest.approx(counts.mean())
    assert seen["sampling/support_bytes"] == pytest.approx(4 + 4 * counts.mean())
    blind = gap(decoder, without_support(batch), 0.8)
    assert blind[GAP] > 0.05 and "sampling/support_mean" not in blind


def test_a_trainable_head_agrees_too() -> None:
    """It goes another way: logits recomputed chunk by chunk in backward."""
    decoder = decoder_of()
    mine = played(decoder, Sampling(max_tokens=12, top_p=0.8))
    batch = pack(mine, aggregation_weights(mine, Aggregation.TOKEN), tokens_per_microbatch=400)
    frozen, full = gap(decoder, batch, 1.0), gap(decoder, batch, 1.0, full=True)
    assert full[GAP] < 2e-5 and full["entropy"] == pytest.approx(frozen["entropy"], rel=1e-5)


def test_the_reference_policy_has_the_same_action_space() -> None:
    """Without an update the policy is its own reference: the KL is 0 where both are over the support."""
    decoder = decoder_of()
    mine = played(decoder, Sampling(max_tokens=8, top_p=0.6))
    batch = pack(mine, aggregation_weights(mine, Aggregation.TOKEN), tokens_per_microbatch=60)
    trainer = PolicyTrainer(
        decoder,
        init_adapters(decoder.config, AdapterSpec(rank=2), 0),
        algorithm("grpo", kl_coef=0.1),
        settings=TrainerSection(lr=1e-12),
    )
    (part, *_) = [trainer._guard.inputs(one) for one in batch.microbatches]
    (scored,) = trainer._add_reference([part])
    assert scored.reference is not None
    np.testing.assert_allclose(scored.reference.numpy(), part.source.logprobs, atol=2e-5)


def test_a_token_outside_of_its_support_is_refused_by_name() -> None:
    (one, *_) = played(decoder_of(), Sampling(max_tokens=4, top_k=3))
    assert one.support is not None
    place = int(np.flatnonzero(one.loss_mask)[1])
    outside = next(token for token in range(61) if token not in one.support.take(np.array([place])).ids)
    tokens = one.tokens.copy()
    tokens[place] = outside
    wrong = replace(one, tokens=tokens)
    with pytest.raises(ValueError, match=f"sample 0#0: token {place} is not in its support"):
        pack([wrong], aggregation_weights([wrong], Aggregation.TOKEN), tokens_per_microbatch=40)
