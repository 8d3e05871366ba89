"""Whether replaying the sampler's experts is worth it, from the measured mismatch (``observe.mismatch``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# When adaptive replay is on. R3's appendix has native F(2) of 1.7e-5 to 2.3e-3 for mixtures of experts and,
# with replay, mostly below 1e-4: above it there is something to gain. A batch of fewer than 10,000 tokens
# is above it with a single such token, so the doubt goes to replay.
F2_ON = 1e-4
# nats per token: a dense 8B shows 6.4e-4, a mixture of 30B 1.5e-3 and with replay 7.5e-4 (section 3 of the
# paper). More than 1e-3 is more than precision alone explains.
K3_ON = 1e-3
_THREE = 3.0  # nothing seen in n tokens: with 95 % confidence the share is below 3 / n


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether to replay, and why, in words for the log."""

    on: bool
    reason: str


def decide(
    native: Mapping[str, Any], replay: Mapping[str, Any] | None = None, *, minibatches: int, on: bool = False
) -> Decision:
    """Should a mixture of experts replay, given its native ARM and that with ``replay``, the optimizer steps
    that a batch may take, and whether it does so now (``on``)?

    Not where replay makes k3 worse, the intervals apart: that is what misaligned routes do. Several
    optimizer steps: yes, whatever else the ARMs say, because routes flip between them (about a tenth per
    gradient update, GSPO, arXiv 2507.18071). One: only if the mismatch is more than precision explains;
    replay makes the policy that is trained conditional on the routes, and on-policy that can hurt (arXiv
    2512.01374). A single token of a small batch may switch it on; it goes off only by a batch with enough
    tokens to show that it is not needed, or every measurement would turn it.
    """
    if replay is not None and replay["k3_low"] > native["k3_high"]:  # never true of intervals that are NaN
        return Decision(
            on=False,
            reason=f"replay is off: k3 is {replay['k3']:.2g} nats/token with the carried experts and "
            f"{native['k3']:.2g} without, and the intervals are apart, as with misaligned routes",
        )
    f2, k3 = tail(native, 2.0), native["k3"]
    if minibatches >= 2:
        return Decision(
            on=True,
            reason=f"replay is on: a batch takes {minibatches} optimizer steps, and routes flip between them",
        )
    if f2 > F2_ON:
        return Decision(on=True, reason=f"replay is on: native F(2) is {f2:.2g}, above {F2_ON:g}")
    if not k3 <= K3_ON:
        return Decision(on=True, reason=f"replay is on: native k3 is {k3:.2g} nats/token, above {K3_ON:g}")
    if on and (f2 + _THREE / native["tokens"] > F2_ON or not native["k3_high"] <= K3_ON):
        return Decision(
            on=True,
            reason=f"replay stays on: native F(2) is {f2:.2g} and k3 {k3:.2g} nats/token, but "
            f"{native['tokens']} tokens are too few to rule out {F2_ON:g} and {K3_ON:g}",
        )
    return Decision(
        on=False,
        reason=f"replay is off: one optimizer step per batch, native F(2) {f2:.2g} (up to {F2_ON:g}) and k3 "
        f"{k3:.2g} nats/token (up to {K3_ON:g}) need none",
    )


def tail(arm: Mapping[str, Any], tau: float) -> float:
    """F(tau) of an ARM, tau one of TAUS."""
    return next(share for at, share in arm["tails"] if at == tau)
