"""Proves that a server samples from the published policy, by its log-probabilities and our decoder's.

There is a comparison at each publish, on tokens that the server has sampled (``prompt_logprobs`` crash vLLM
0.32 on a CPU where other requests are in the batch):

    k3 of all its tokens                     a wrong base, dtype or adapter
    each kind of adapter, left out of ours   a kind that the server does not apply, by its name

With s the server's log-probabilities, a ours and b ours without the kind, the share of the kind that the
server applies is (s - b).(a - b) / |a - b|^2: 1 where it is applied, 0 where it is ignored, with a standard
error that the rest of s - b gives. A kind whose effect is lost in rounding is not judged; ``canary`` has
factors that are large enough for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ostinato.algo.offpolicy import kl_k3
from ostinato.engine.vllm_server import make_vllm_lost
from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.shapes import AdapterSpec
from ostinato.types import Completion, Request

ERRORS = 2.0  # standard errors by which k3 must exceed the bound to count
CERTAIN = 3.0  # standard errors by which a kind's share must be below a half to count
EFFECT = 0.05  # norm of a canary's update, as a share of the weight's norm
LEAST_NOISE = 1e-6  # of a log-probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The measured distance of a server from our decoder for a policy."""

    version: int  # of the policy
    k3: float  # the mean over tokens
    tokens: int


def draw_canary(decoder: Decoder, spec: AdapterSpec) -> Adapters:
    """Draw adapters of every kind in ``spec`` whose update has EFFECT of each weight's norm."""
    adapters, linears = (
        init_adapters(decoder.config, spec, seed=1, device=decoder.device),
        decoder.named_linears(),
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, (a, b) in adapters.tensors.items():
            weight = linears[name].weight
            repeats = weight.shape[0] if weight.dim() > a.dim() else 1  # experts that share a single A
            size = spec.get_scale(name) * float(a.norm()) * math.sqrt(b.shape[-2] * repeats)
            std = EFFECT * float(torch.linalg.vector_norm(weight, dtype=torch.float32)) / size
            b.copy_(torch.randn(b.shape, generator=generator) * std)
    return adapters


def prove_policy(
    decoder: Decoder,
    adapters: Adapters | None,
    request: Request,
    completion: Completion,
    *,
    bound: float,
) -> Verdict:
    """Compare the answer, sampled at a temperature above 0 by a single policy, with our decoder under
    ``adapters``. Raises WorkerLost if a kind of adapter is not applied, which it names, or if k3 is above
    ``bound``."""
    version = int(completion.versions[0])
    server_logprobs = torch.from_numpy(completion.logprobs).double()
    own_logprobs = _score_tokens(decoder, adapters, request, completion.tokens)
    for kind in list_kinds(adapters):
        without = _score_tokens(decoder, _drop_kind(adapters, kind), request, completion.tokens)
        if is_ignored(server_logprobs, own_logprobs, without):
            raise make_vllm_lost(
                f"vLLM does not apply the adapters of {kind}: policy {version} is refused; leave them out "
                "of adapter.targets"
            )
    k3 = kl_k3(own_logprobs - server_logprobs).numpy()
    if is_above(k3, bound):
        raise make_vllm_lost(
            f"vLLM is not the policy that is trained: k3 is {k3.mean():.3g} for policy {version} on "
            f"{len(k3)} tokens, and {bound:g} is the bound; compare model and dtype"
        )
    return Verdict(version=version, k3=float(k3.mean()), tokens=len(k3))


def is_above(k3: np.ndarray, bound: float) -> bool:
    """Return whether the mean of k3 ([T], of tokens) is above ``bound`` by ERRORS standard errors; never for
    a single token."""
    error = float(k3.std(ddof=1)) / math.sqrt(len(k3)) if len(k3) > 1 else math.inf
    return float(k3.mean()) - ERRORS * error > bound


def is_ignored(theirs: torch.Tensor, ours: torch.Tensor, without: torch.Tensor) -> bool:
    """Return whether ``theirs`` ([T] log-probabilities) are those ``without`` a kind of adapter and not
    ``ours`` with it, by CERTAIN standard errors; False if the kind has no effect."""
    effect, difference = ours - without, theirs - without
    size = float(effect.norm())
    if size == 0.0:
        return False
    share = float(difference @ effect) / size**2
    residual = (difference - share * effect).square().sum() / max(len(difference) - 1, 1)
    error = max(float(residual.sqrt()), LEAST_NOISE) / size
    return share + CERTAIN * error < 0.5


def list_kinds(adapters: Adapters | None) -> Mapping[str, None]:
    """Return the kinds with a B that is not zero, such as "attn.q" and "experts.down", in order and without
    values."""
    pairs = adapters.tensors.items() if adapters is not None else ()
    return dict.fromkeys(name.split(".", 2)[2] for name, (_, b) in pairs if bool(b.any()))


def _drop_kind(adapters: Adapters | None, kind: str) -> Adapters:
    assert adapters is not None
    tensors = {name: pair for name, pair in adapters.tensors.items() if name.split(".", 2)[2] != kind}
    return Adapters(adapters.spec, tensors, adapters.config)


def _score_tokens(
    decoder: Decoder, adapters: Adapters | None, request: Request, tokens: np.ndarray
) -> torch.Tensor:
    """Compute the log-probabilities [T] float64 of ``tokens`` [T] after the prompt."""
    text = np.concatenate([request.tokens, tokens]).astype(np.int64)
    rows = torch.from_numpy(text).to(decoder.device)
    with torch.inference_mode():
        places = torch.arange(len(rows), device=decoder.device)
        hidden, _ = decoder(rows, places, CausalAttention(), adapters=adapters)
        logits = decoder.logits(hidden[len(request.tokens) - 1 : -1]).float() / request.sampling.temperature
        scores = logits.log_softmax(-1).gather(1, rows[len(request.tokens) :, None])[:, 0]
    return scores.cpu().double()
