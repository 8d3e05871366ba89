"""Whether a server samples from the policy that was published: its log-probabilities against our decoder's.

Uses sampled tokens, and not a text that the server is to score: ``prompt_logprobs`` crash vLLM 0.32 on a CPU
where other requests are in the batch, since its adapter of the head takes all rows for sampled ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from ostinato.algo.offpolicy import kl_k3
from ostinato.engine.vllm_server import vllm_wrong
from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.types import Completion, Request, Sampling

LEAST, MOST = 32, 1024  # tokens to judge by
OF_AN_ANSWER, BEHIND = 64, 2048  # tokens of an answer that are scored, and of the longest prompt
ERRORS = 2.0  # standard errors above the bound before fewer than MOST tokens count against a server


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far a server is from our decoder, as measured for one policy."""

    version: int  # of the policy
    k3: float  # the mean over tokens
    tokens: int


class Proofs:
    """Proofs that one server samples from the policies published to it, by label."""

    def __init__(self, decoder: Decoder, bound: float) -> None:
        self._decoder, self._bound = decoder, bound
        self._sure = set[str]()
        self._measured: dict[str, np.ndarray] = {}  # k3 of each token so far
        self._verdicts = deque[Verdict](maxlen=1)  # put by one thread, taken by another

    def forget(self) -> None:
        """Start over: the server is a new one."""
        self._sure.clear()
        self._measured.clear()

    def want(self, label: str, version: int, request: Request, completion: Completion) -> bool:
        """Whether the policy still needs proof and this answer can give it: sampled by that policy alone,
        from its unfiltered distribution, after a prompt that is not too long."""
        sampling = request.sampling
        plain = sampling.temperature > 0 and not sampling.filtered and not sampling.min_tokens
        whole = len(completion.tokens) > 0 and bool((completion.versions == version).all())
        return label not in self._sure and plain and whole and len(request.tokens) <= BEHIND

    def hear(self, label: str, adapters: Adapters | None, request: Request, completion: Completion) -> None:
        """Judge the policy by one more answer. Raises WorkerLost where it is not the published one."""
        if label in self._sure:
            return
        tokens = completion.tokens[:OF_AN_ANSWER]
        ours = scores(self._decoder, adapters, np.concatenate([request.tokens, tokens]), request.sampling)
        log_ratio = ours[-len(tokens) :] - torch.from_numpy(completion.logprobs[: len(tokens)])
        before = self._measured.get(label, np.zeros(0, np.float32))
        found = self._measured[label] = np.concatenate([before, kl_k3(log_ratio).numpy()])
        right = verdict(found, self._bound)
        if right is False:
            raise vllm_wrong(
                f"vLLM is not the policy that is trained: k3 is {found.mean():.3g} for policy {label} on "
                f"{len(found)} tokens, and {self._bound:g} is the bound; compare model and dtype"
            )
        if right:
            self._sure.add(label)
            self._measured.pop(label, None)
            version = int(completion.versions[0])
            self._verdicts.append(Verdict(version=version, k3=float(found.mean()), tokens=len(found)))

    def take_verdict(self) -> Verdict | None:
        """The newest since the last call; None: none."""
        return self._verdicts.pop() if self._verdicts else None


def verdict(k3: np.ndarray, bound: float) -> bool | None:
    """Is the mean of k3 ([T], of single tokens) below ``bound``? None: too few tokens to say."""
    if len(k3) < LEAST:
        return None
    mean, error = float(k3.mean()), float(k3.std(ddof=1)) / math.sqrt(len(k3))
    if mean < bound:
        return True
    return False if len(k3) >= MOST or mean - ERRORS * error > bound else None


def scores(
    decoder: Decoder, adapters: Adapters | None, tokens: np.ndarray, sampling: Sampling
) -> torch.Tensor:
    """[T - 1] log-probabilities of ``tokens`` [T], from the second one on, at a temperature above 0."""
    rows = torch.from_numpy(tokens.astype(np.int64)).to(decoder.device)
    with torch.inference_mode():
        places = torch.arange(len(rows), device=decoder.device)
        hidden, _ = decoder(rows, places, CausalAttention(), adapters=adapters)
        logits = decoder.logits(hidden[:-1]).float() / sampling.temperature
        return logits.log_softmax(-1).gather(1, rows[1:, None])[:, 0].cpu()
