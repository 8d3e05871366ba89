"""The obvious twin of ``algo.pack.pack``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.algo.pack import _check_samples, _gather_support, _make_batch
from ostinato.types import Batch, Microbatch, Sample, Segment


def pad(samples: Sequence[Sample], weights: Sequence[np.ndarray], *, version: int = 0) -> Batch:
    """A microbatch per sample, every token a row, nothing shared."""
    _check_samples(samples, weights, tokens_per_microbatch=1)
    microbatches = []
    for index, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        trained = np.array([t for t in range(len(sample.tokens)) if sample.loss_mask[t]], dtype=np.int32)
        microbatches.append(
            Microbatch(
                tokens=sample.tokens.astype(np.int32),
                positions=np.arange(len(sample.tokens), dtype=np.int32),
                segments=(Segment(start=0, stop=len(sample.tokens)),),
                rows=trained - 1,
                targets=sample.tokens[trained].astype(np.int32),
                logprobs=sample.logprobs[trained].astype(np.float32),
                advantages=sample.advantages[trained].astype(np.float32),
                weights=weight[trained].astype(np.float32),
                sample_idx=np.full(len(trained), index, dtype=np.int32),
                staleness=(version - sample.versions[trained]).astype(np.int32),
                uids=(sample.uid,),
                support=_gather_support([sample], [trained]),
                experts=sample.experts,
            )
        )
    return _make_batch(microbatches, len(samples))
