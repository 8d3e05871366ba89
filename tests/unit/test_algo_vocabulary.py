"""Log-probabilities over a vocabulary in parts, against the whole of it: values, gradients, supports, chunks.

The parts are threads that meet in every sum and maximum, as ranks do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.algo.logprobs import Vocabulary, chunked_logprobs, linear_logprobs
from ostinato.types import Support


def problem(rows: int = 7, dim: int = 5, vocab: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=torch.float64, generator=generator)
    return hidden, weight, torch.randint(vocab, (rows,), generator=generator)


def support_of(targets: Tensor, vocab: int, seed: int, share: float) -> Support:
    """For ``share`` of the rows some ids with the target among them."""
    rng = np.random.default_rng(seed)
    kept = [
        np.union1d(rng.integers(0, vocab, rng.integers(0, vocab)), [target]) if rng.random() < share else []
        for target in targets.tolist()
    ]
    return Support.of([np.array(ids, np.int32) for ids in kept])


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
@settings(max_examples=30, deadline=None)
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
