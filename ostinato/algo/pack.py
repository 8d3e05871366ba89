"""Packs samples into a Batch: no padding, the prompt of siblings computed once, the next-token shift.

This is the only place where a token is paired with the row that predicts it: token t of a sample is
predicted by the row of token t-1, and the first token after a shared prompt by the prompt's last row.

A forward row exists only if a loss depends on it: the last trained token of a sample is a target and
never an input, and no loss depends on what follows it. So a microbatch holds fewer rows than
the samples have tokens; nothing that is trained is ever left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from ostinato.types import Batch, Microbatch, Sample, Segment, Support


class Aggregation(StrEnum):
    """How per-token losses become one number (compared in ScaleRL, arXiv 2510.13786, section 3)."""

    TOKEN = "token"  # every token of the step counts the same (DAPO)
    SAMPLE = "sample"  # mean over samples of the mean over tokens (GRPO)
    PROMPT = "prompt"  # mean over prompts of the mean over the tokens of its group (ScaleRL)
    CONSTANT = "constant"  # sum over tokens / (samples * max_tokens) (Dr.GRPO)


def aggregation_weights(
    samples: Sequence[Sample], mode: Aggregation, *, max_tokens: int = 0
) -> list[np.ndarray]:
    """Per-token weights [L] float64 of each sample, 0 outside its mask: loss = sum(weights * token loss).

    They sum to 1 over the step, except ``constant`` (at most 1, and independent of lengths by design).
    Samples and prompts without a trained token do not count in the means of ``sample`` and ``prompt``. The
    rows of one episode (same ``group`` and ``member``) are one sample here.
    Raises ValueError when ``constant`` is requested without ``max_tokens``, the longest completion allowed.
    """
    lengths = np.array([int(sample.loss_mask.sum()) for sample in samples], dtype=np.int64)
    match mode:
        case Aggregation.TOKEN:
            denominators = np.full(len(samples), lengths.sum())
        case Aggregation.SAMPLE:
            episode_idx = _number_episodes(samples)
            token_counts = np.bincount(episode_idx, weights=lengths)
            denominators = token_counts[episode_idx] * np.count_nonzero(token_counts)
        case Aggregation.PROMPT:
            _, group_idx = np.unique([sample.group for sample in samples], return_inverse=True)
            token_counts = np.bincount(group_idx, weights=lengths)
            denominators = token_counts[group_idx] * np.count_nonzero(token_counts)
        case Aggregation.CONSTANT:
            if max_tokens < 1:
                raise ValueError(
                    f"max_tokens is {max_tokens} but aggregation 'constant' divides by it; use 1 or more"
                )
            num_episodes = int(_number_episodes(samples).max(initial=-1)) + 1
            denominators = np.full(len(samples), num_episodes * max_tokens)
    return [
        sample.loss_mask / np.float64(max(denominator, 1))
        for sample, denominator in zip(samples, denominators, strict=True)
    ]


def _number_episodes(samples: Sequence[Sample]) -> np.ndarray:
    """Episode [S] int64 of each sample, numbered from 0."""
    number_by_key: dict[tuple[int, int | None, int], int] = {}
    keys = [
        (sample.group, sample.member, index if sample.member is None else -1)
        for index, sample in enumerate(samples)
    ]
    return np.array([number_by_key.setdefault(key, len(number_by_key)) for key in keys], np.int64)


def pack(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    *,
    tokens_per_microbatch: int,
    minibatches: int = 1,
    share_prompts: bool = True,
    version: int = 0,
) -> Batch:
    """Pack samples and their weights (each [L]) into microbatches of at most ``tokens_per_microbatch`` rows.

    Siblings (same group, same first ``prompt_len`` tokens, same routing of these) share the rows of their
    prompt; one whose prompt was recomputed, by another policy or in another batch, may have other experts
    and gets its own rows. A group beyond the budget is split and its prompt repeated; a sample beyond the
    budget gets its own microbatch. First-fit-decreasing, twice: siblings into parts, parts into
    microbatches; ties keep the order of ``samples``, so the result is a function of the input. ``sample_idx``
    indexes ``samples``, the rows of one sample are contiguous, and a sample without trained tokens appears in
    no microbatch. ``staleness`` is ``version`` minus the token's. Each of ``minibatches`` optimizer steps has
    whole groups, in the order of ``samples`` and in numbers that differ by at most one, and is packed
    separately. With fewer groups than ``minibatches``, there is one minibatch per group.

    Raises ValueError for ``tokens_per_microbatch`` below 1, and for a sample that trains on its prompt, has
    no prompt, has weights of another length, has no routing while others have one, or has a token outside of
    the support recorded for it.
    """
    _check_samples(samples, weights, tokens_per_microbatch)
    families_by_step = _split_into_steps(_group_families(samples, share_prompts), samples, minibatches)
    microbatches = [
        replace(_build_microbatch(parts, samples, weights, version), minibatch=step)
        for step, families in enumerate(families_by_step)
        for parts in _fill_microbatches(families, samples, tokens_per_microbatch)
    ]
    return _make_batch(microbatches, len(samples))


@dataclass(frozen=True, slots=True)
class _Part:
    """Siblings in one microbatch: ``prefix`` shared rows, then the rest of each member."""

    members: tuple[int, ...]  # indices into samples
    prefix: int  # 0 for a single member, whose prompt and answer are then one causal segment
    num_rows: int


def _check_samples(
    samples: Sequence[Sample], weights: Sequence[np.ndarray], tokens_per_microbatch: int
) -> None:
    """Raise ValueError for the arguments that ``pack`` refuses."""
    if tokens_per_microbatch < 1:
        raise ValueError(f"tokens_per_microbatch is {tokens_per_microbatch}; use at least 1")
    for sample, weight in zip(samples, weights, strict=True):
        if len(weight) != len(sample.tokens):
            raise ValueError(f"sample {sample.uid}: {len(weight)} weights for {len(sample.tokens)} tokens")
        if not 1 <= sample.prompt_len <= len(sample.tokens):
            raise ValueError(
                f"sample {sample.uid}: prompt_len is {sample.prompt_len}; use 1 to {len(sample.tokens)}, "
                "because the first trained token needs a row that predicts it"
            )
        if sample.loss_mask[: sample.prompt_len].any():
            raise ValueError(
                f"sample {sample.uid}: loss_mask is True inside the prompt (prompt_len {sample.prompt_len}); "
                "mask it, or shorten prompt_len to the tokens before the first trained one"
            )
        if sample.support is not None and not (is_held := sample.support.holds(sample.tokens)).all():
            raise ValueError(
                f"sample {sample.uid}: token {int(is_held.argmin())} is not in its support, the ids that it "
                "was drawn from; record both in one pass or leave the support out"
            )
    if len({sample.experts is None for sample in samples}) > 1:
        uid = next(sample.uid for sample in samples if sample.experts is None)
        raise ValueError(f"sample {uid}: experts is missing but other samples have it; replay all or none")


def _split_into_steps(
    families: Sequence[list[int]], samples: Sequence[Sample], num_steps: int
) -> list[list[list[int]]]:
    """The families of each of at most ``num_steps`` optimizer steps. Groups stay whole and in the order of
    the stream, which is shuffled. A split by size would give one step all the long groups, and another most
    of the prompts."""
    groups = [samples[family[0]].group for family in families]
    group_index = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    num_steps = min(num_steps, len(group_index))
    families_by_step: list[list[list[int]]] = [[] for _ in range(num_steps)]
    for family, group in zip(families, groups, strict=True):
        families_by_step[group_index[group] * num_steps // len(group_index)].append(family)
    return families_by_step


def _fill_microbatches(
    families: Sequence[list[int]], samples: Sequence[Sample], budget: int
) -> list[list[_Part]]:
    """The parts of every microbatch of at most ``budget`` rows."""
    parts = [part for family in families for part in _split_family(family, samples, budget)]
    return [
        [parts[i] for i in part_indices]
        for part_indices in _fill_bins([part.num_rows for part in parts], budget)
    ]


def _count_inputs(sample: Sample) -> int:
    """Number of tokens that must pass through the layers: all before the last trained one."""
    return int(np.flatnonzero(sample.loss_mask)[-1])


def _group_families(samples: Sequence[Sample], share_prompts: bool) -> list[list[int]]:
    """Indices of the samples that may share a prompt, in order of appearance, without those that have no
    trained token."""
    families: dict[tuple[int, bytes, bytes], list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.loss_mask.any():
            key = (sample.group, *_make_prompt_key(sample)) if share_prompts else (index, b"", b"")
            families.setdefault(key, []).append(index)
    return list(families.values())


def _make_prompt_key(sample: Sample) -> tuple[bytes, bytes]:
    """Key that siblings have in common where they share the rows of a prompt: its tokens and its routes."""
    routes = b"" if sample.experts is None else sample.experts[: sample.prompt_len].tobytes()
    return sample.tokens[: sample.prompt_len].tobytes(), routes


def count_split_prompts(samples: Sequence[Sample]) -> int:
    """Number of further times that ``pack`` runs a prompt because siblings were routed to different experts
    in it."""
    prompts = {(sample.group, *_make_prompt_key(sample)) for sample in samples if sample.loss_mask.any()}
    return len(prompts) - len({(group, tokens) for group, tokens, _ in prompts})


def _split_family(family: list[int], samples: Sequence[Sample], budget: int) -> list[_Part]:
    """Parts of a family, each within the budget where that is possible, each with the whole prompt."""
    prompt_len = samples[family[0]].prompt_len
    answer_lengths = [_count_inputs(samples[index]) - prompt_len for index in family]
    parts = []
    for member_indices in _fill_bins(answer_lengths, budget - prompt_len):
        num_rows = prompt_len + sum(answer_lengths[i] for i in member_indices)
        members = tuple(family[i] for i in sorted(member_indices))
        parts.append(_Part(members=members, prefix=prompt_len if len(members) > 1 else 0, num_rows=num_rows))
    return parts


def _fill_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing bins of indices; an item beyond the capacity is alone in its bin."""
    bins: list[list[int]] = []
    free_space: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        bin_idx = next((b for b, space in enumerate(free_space) if sizes[item] <= space), len(bins))
        if bin_idx == len(bins):
            bins.append([])
            free_space.append(capacity)
        bins[bin_idx].append(item)
        free_space[bin_idx] -= sizes[item]
    return bins


@dataclass(slots=True)
class _Layout:
    """The tokens of a microbatch's forward rows, and the row that predicts each target, while it is built."""

    slices: list[tuple[int, int, int]] = field(default_factory=list)  # (sample, first token, last token + 1)
    segments: list[Segment] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)  # per placed sample
    num_rows: int = 0

    def place(self, part: _Part, samples: Sequence[Sample]) -> None:
        """Append the rows of a part: its shared prompt, then the rest of each member."""
        prompt_start = self.num_rows if part.prefix else 0
        if part.prefix:
            self._append(part.members[0], 0, part.prefix)
        for index in part.members:
            answer_start = self.num_rows
            self._append(index, part.prefix, _count_inputs(samples[index]), prefix_start=prompt_start)
            predictor_tokens = np.flatnonzero(samples[index].loss_mask) - 1
            in_prompt = predictor_tokens < part.prefix
            self.rows.append(
                np.where(
                    in_prompt, prompt_start + predictor_tokens, answer_start + predictor_tokens - part.prefix
                )
            )

    def _append(self, index: int, first_token: int, stop_token: int, prefix_start: int = 0) -> None:
        """Append tokens ``first_token`` to ``stop_token`` of a sample as a segment that reads the prefix
        before them."""
        if first_token == stop_token:  # a completion of one token is predicted by the prompt and needs no row
            return
        start, stop = self.num_rows, self.num_rows + stop_token - first_token
        self.slices.append((index, first_token, stop_token))
        self.segments.append(
            Segment(start=start, stop=stop, prefix_start=prefix_start, prefix_stop=prefix_start + first_token)
        )
        self.num_rows = stop


def _build_microbatch(
    parts: Sequence[_Part], samples: Sequence[Sample], weights: Sequence[np.ndarray], version: int
) -> Microbatch:
    """The microbatch of ``parts``; targets in the order of their members."""
    layout = _Layout()
    for part in parts:
        layout.place(part, samples)
    sample_indices = [index for part in parts for index in part.members]
    members = [samples[index] for index in sample_indices]
    target_indices = [np.flatnonzero(sample.loss_mask) for sample in members]

    def gather_inputs(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([arrays[index][start:stop] for index, start, stop in layout.slices])

    def gather_targets(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(
            [array[indices] for array, indices in zip(arrays, target_indices, strict=True)]
        ).astype(dtype)

    experts = [sample.experts for sample in samples if sample.experts is not None]  # all or none: checked
    return Microbatch(
        tokens=gather_inputs([sample.tokens for sample in samples]).astype(np.int32),
        positions=np.concatenate(
            [np.arange(start, stop, dtype=np.int32) for _, start, stop in layout.slices]
        ),
        segments=tuple(layout.segments),
        rows=np.concatenate(layout.rows).astype(np.int32),
        targets=gather_targets([sample.tokens for sample in members], np.int32),
        logprobs=gather_targets([sample.logprobs for sample in members], np.float32),
        advantages=gather_targets([sample.advantages for sample in members], np.float32),
        weights=gather_targets([weights[index] for index in sample_indices], np.float32),
        sample_idx=np.repeat(
            np.array(sample_indices, dtype=np.int32), [len(indices) for indices in target_indices]
        ),
        staleness=version - gather_targets([sample.versions for sample in members], np.int32),
        uids=tuple(sample.uid for sample in members),
        support=_gather_support(members, target_indices),
        experts=gather_inputs(experts) if experts else None,
    )


def _gather_support(samples: Sequence[Sample], target_indices: Sequence[np.ndarray]) -> Support | None:
    """The support of the ``target_indices`` tokens (indices in each sample); None where no sample has one."""
    if all(sample.support is None for sample in samples):
        return None
    return Support.concatenate(
        [
            Support.whole(len(indices)) if sample.support is None else sample.support.take(indices)
            for sample, indices in zip(samples, target_indices, strict=True)
        ]
    )


def _make_batch(microbatches: Sequence[Microbatch], num_samples: int) -> Batch:
    """The batch of these microbatches, with its counts of tokens."""
    num_loss_rows = sum(len(np.unique(microbatch.rows)) for microbatch in microbatches)
    return Batch(
        microbatches=tuple(microbatches),
        num_samples=num_samples,
        num_tokens=sum(len(microbatch.rows) for microbatch in microbatches),
        num_context_tokens=sum(len(microbatch.tokens) for microbatch in microbatches) - num_loss_rows,
    )
