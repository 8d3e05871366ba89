"""Named algorithms: a frozen record of vetted choices, every one of which can be overridden by name.

``algorithm("dapo", clip_high=0.3)`` is DAPO with one key changed by the user, listed in ``overridden``.
A name stands for choices of advantage, aggregation and loss; the trainer sees only ``policy_loss``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from ostinato.algo import losses
from ostinato.algo.advantages import Baseline, Overlong, Pool, Rewards, Scale, check_choices
from ostinato.algo.losses import LossTerms
from ostinato.algo.offpolicy import Correction
from ostinato.algo.own_loss import OwnLoss, load_loss
from ostinato.algo.pack import Aggregation
from ostinato.other_names import key_hint


class Loss(StrEnum):
    """The policy loss (``algo.losses``)."""

    CLIPPED = "clipped"
    SEQUENCE_CLIPPED = "sequence_clipped"
    CISPO = "cispo"
    REINFORCE = "reinforce"


class Reference(StrEnum):
    """The policy to which ``kl_coef`` measures the KL divergence."""

    BASE = "base"  # the model without an adapter
    START = "start"  # what the run began with: adapter.path


class Anchor(StrEnum):
    """The policy whose log-probabilities are the denominator of the ratio new / old."""

    AUTO = "auto"  # with a correction the trainer's, without one the sampler's ("bypass")
    TRAINER = "trainer"  # the trainer's at the start of the step, even without a correction


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One RL algorithm. The defaults here are GRPO without its KL term; ``algorithm`` names the others.

    ``anchor`` and ``correction``: without a correction, the sampler's log-probabilities are the anchor of the
    ratio ("bypass": the ratio is itself the correction, and forwards are saved). With one, the anchor is the
    trainer at the start of the step, and trainer/sampler is corrected separately, within bounds that
    ``algorithm`` takes from ``BOUNDS``. ``anchor="trainer"`` without a correction ignores the mismatch: what
    the literature calls GRPO without importance sampling, and the baseline in one study of the lab.

    Raises ValueError for numbers out of range, for choices that do not fit together (``check_choices``), and
    where neither rewards nor a teacher would teach anything.
    """

    name: str = "grpo"
    loss: Loss | OwnLoss = Loss.CLIPPED
    clip_low: float = 0.2  # 1 - clip_low is the lower bound of the ratio
    clip_high: float = 0.2  # 1 + clip_high is its upper bound
    ratio_cap: float = 5.0  # CISPO: absolute cap of the ratio
    rewards: Rewards = Rewards.SUM  # of several functions: summed, or each compared by itself
    baseline: Baseline = Baseline.GROUP_MEAN
    scale: Scale = Scale.GROUP
    batch_pool: Pool = Pool.KEPT  # scale 'batch': deviation over kept groups, or over all
    aggregation: Aggregation = Aggregation.SAMPLE
    drop_zero_variance: bool = False
    mask_truncated: bool = False  # completions cut by length are not trained on
    overlong_buffer: float = 0.0  # share of max_tokens over which the reward falls; 0 = off
    overlong_factor: float = 1.0  # by how much it falls
    overlong_scope: Overlong = Overlong.ALL  # the answers whose reward falls
    anchor: Anchor = Anchor.AUTO
    correction: Correction = Correction.NONE
    correction_low: float = 0.0
    correction_high: float = 2.0
    kl_coef: float = 0.0  # weight of k3 to the reference policy
    kl_reference: Reference = Reference.BASE
    teacher_coef: float = 0.0  # weight of log p(teacher) - log p(policy) in the advantage of a token
    reward_coef: float = 1.0  # weight of the advantage by rewards; 0: rewards are measured only
    entropy_coef: float = 0.0
    shuffled: bool = False  # a control: the rewards of a group are permuted among its answers
    overridden: tuple[str, ...] = ()  # the user's keys, in their order

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            if not minimum <= getattr(self, name) < float("inf"):
                raise ValueError(f"algo.{name} is {getattr(self, name)}; use a number from {minimum:g}")
        if self.clip_low > 1 and self.loss in (Loss.CLIPPED, Loss.SEQUENCE_CLIPPED):
            raise ValueError(f"algo.clip_low is {self.clip_low}; a ratio is positive, use at most 1")
        if self.overlong_buffer > 1:
            raise ValueError(
                f"algo.overlong_buffer is {self.overlong_buffer}; use a share of max_tokens, 0 to 1"
            )
        if self.correction is not Correction.NONE and self.correction_low > 1:
            raise ValueError(f"algo.correction_low is {self.correction_low} and masks 1; use at most 1")
        if self.reward_coef == 0 and (self.teacher_coef == 0 or self.drop_zero_variance):
            key = "drop_zero_variance is true" if self.teacher_coef else "teacher_coef is 0"
            raise ValueError(
                f"algo.reward_coef is 0 and algo.{key}, so nothing is learned; change one of them"
            )
        check_choices(self.baseline, self.scale, self.batch_pool)

    @property
    def is_decoupled(self) -> bool:
        """Whether the ratio is anchored to the trainer's policy, not to the sampler's."""
        return self.anchor is Anchor.TRAINER or self.correction is not Correction.NONE

    @property
    def needs_reference(self) -> bool:
        """Whether ``policy_loss`` needs ``ref_logprobs``."""
        return self.kl_coef > 0

    @property
    def needs_teacher(self) -> bool:
        """Whether ``policy_loss`` needs ``teacher_logprobs``."""
        return self.teacher_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether ``policy_loss`` needs an entropy with gradient."""
        return self.entropy_coef > 0


_MINIMA = {
    "clip_low": 0.0,
    "clip_high": 0.0,
    "ratio_cap": 1.0,
    "overlong_buffer": 0.0,
    "overlong_factor": 0.0,
    "correction_low": 0.0,
    "correction_high": 1.0,
    "kl_coef": 0.0,
    "teacher_coef": 0.0,
    "reward_coef": 0.0,
    "entropy_coef": 0.0,
}

# What each name changes relative to GRPO, and the sources of the numbers.
NAMED: Mapping[str, Mapping[str, Any]] = {
    # arXiv 2402.03300, section 4.1. The clip of PPO; no KL term (the paper's 0.04 went out of use; TRL: 0).
    "grpo": {},
    # arXiv 2503.20783: neither length nor deviation in any denominator.
    "dr_grpo": {"scale": Scale.NONE, "aggregation": Aggregation.CONSTANT},
    # arXiv 2503.14476, section 3: clip-higher 0.28, token mean, groups without variance dropped, and a reward
    # that falls over the last 4096 of 20480 tokens (a fifth).
    "dapo": {
        "clip_high": 0.28,
        "aggregation": Aggregation.TOKEN,
        "drop_zero_variance": True,
        "overlong_buffer": 0.2,
    },
    # arXiv 2507.18071, section 4. The clip is ten times the paper's (3e-4 and 4e-4, section 5.1): ScaleRL
    # (arXiv 2510.13786) swept it and found that scale clearly worse.
    "gspo": {"loss": Loss.SEQUENCE_CLIPPED, "clip_low": 3e-3, "clip_high": 4e-3},
    # ScaleRL, arXiv 2510.13786, section 4: cap in {4, 5, 8}, prompt mean, batch deviation, variance required.
    "cispo": {
        "loss": Loss.CISPO,
        "scale": Scale.BATCH,
        "aggregation": Aggregation.PROMPT,
        "drop_zero_variance": True,
    },
    # arXiv 2402.14740. The sequence is one action: token log-probabilities are summed, so no length may
    # divide them; the constant in front of the sum only scales the gradient.
    "rloo": {
        "loss": Loss.REINFORCE,
        "baseline": Baseline.LEAVE_ONE_OUT,
        "scale": Scale.NONE,
        "aggregation": Aggregation.CONSTANT,
    },
    # arXiv 2501.03262: clipped, token mean, advantages whitened over the step (here per completion, not per
    # token). The paper's KL in the reward is off; kl_coef adds one to the loss. Group size 1 is allowed.
    "reinforce_pp": {
        "baseline": Baseline.BATCH_MEAN,
        "scale": Scale.BATCH,
        "batch_pool": Pool.ALL,
        "aggregation": Aggregation.TOKEN,
    },
    # ibid., REINFORCE++-baseline: the group's mean as baseline, the step's deviation as scale.
    "reinforce_pp_baseline": {"scale": Scale.BATCH, "batch_pool": Pool.ALL, "aggregation": Aggregation.TOKEN},
    # Thinking Machines, "On-Policy Distillation" (2025): the reverse KL of each token is its advantage; also
    # GKD (arXiv 2306.13649) with lambda 1, MiniLLM (2306.08543). A reward that is mixed in by reward_coef has
    # the mean of the step as its baseline, and no deviation divides it. Group size 1 is allowed.
    "opd": {
        "baseline": Baseline.BATCH_MEAN,
        "scale": Scale.NONE,
        "aggregation": Aggregation.TOKEN,
        "teacher_coef": 1.0,
        "reward_coef": 0.0,
    },
}

# The default correction_low and correction_high of each correction.
BOUNDS: Mapping[Correction, tuple[float, float]] = {
    Correction.TOKEN_TRUNCATE: (0.0, 2.0),  # TIS, Yao et al. 2025
    Correction.TOKEN_MASK: (0.5, 5.0),  # IcePop in Ring-1T, arXiv 2510.18855
    Correction.SEQUENCE_TRUNCATE: (0.0, 2.0),  # as for a token
    Correction.SEQUENCE_MASK: (0.0, 3.0),  # TRL's vllm_importance_sampling_cap
    # Published bounds as tight as 0.999 to 1.001 (arXiv 2512.23075) can leave a mixture of experts nothing to
    # learn from: these reject only answers that are off by a factor of two in the mean token.
    Correction.GEOMETRIC_MASK: (0.5, 2.0),
}


def algorithm(name: str, **overrides: Any) -> Algorithm:
    """The algorithm called ``name`` with the user's keys on top; enum values may be given as strings. A
    correction has the bounds of ``BOUNDS`` unless the user gives others.

    Raises ValueError for an unknown name, key or value (with the nearest match), for a value of the wrong
    type, for an own loss that cannot be used, for values that ``Algorithm`` refuses, and for a key that has
    no effect under the other choices.
    """
    if name not in NAMED:
        key = _find_key_of_choice(name)
        hint = f"that is an algo.{key}, known: {', '.join(NAMED)}" if key else _suggest_nearest(name, NAMED)
        raise ValueError(f"algo.name is {name!r}; {hint}")
    keys = [field.name for field in dataclasses.fields(Algorithm) if field.name not in ("name", "overridden")]
    for key in overrides:
        if key not in keys:
            loss = overrides.get("loss", NAMED[name].get("loss"))
            hint = _explain_foreign_key(key, loss) or _suggest_nearest(key, ["name", *keys])
            raise ValueError(f"algo.{key} is not a key; {hint}")
    values = {key: _parse_value(key, value) for key, value in overrides.items()}
    choices = {**NAMED[name], **values}
    if bounds := BOUNDS.get(choices.get("correction", Correction.NONE)):
        choices = {"correction_low": bounds[0], "correction_high": bounds[1], **choices}
    result = Algorithm(**{**choices, "name": name, "overridden": tuple(overrides)})
    for key, reason in _find_idle_keys(result).items():
        if key in overrides:
            raise ValueError(f"algo.{key} has no effect because {reason}; remove it or change that")
    return result


def _compute_policy_term(
    algorithm: Algorithm,
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    samples: tuple[Tensor, int],  # of each token, and how many there are
    correction: Tensor | None,
) -> LossTerms:
    """The policy loss that ``algorithm.loss`` names."""
    per_token = (new_logprobs, old_logprobs, advantages, weights)
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    match algorithm.loss:
        case Loss.CLIPPED:
            return losses.clipped(*per_token, **clip, correction=correction)
        case Loss.SEQUENCE_CLIPPED:
            return losses.sequence_clipped(*per_token, *samples, **clip, correction=correction)
        case Loss.CISPO:
            return losses.cispo(*per_token, ratio_cap=algorithm.ratio_cap, correction=correction)
        case Loss.REINFORCE:
            return losses.reinforce(new_logprobs, advantages, weights, correction=correction)
        case OwnLoss():
            return losses.own_loss_terms(algorithm.loss, *per_token, *samples, correction=correction)


def policy_loss(
    algorithm: Algorithm,
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sample_idx: Tensor,
    *,
    num_samples: int,
    correction: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossTerms:
    """The loss of one microbatch: policy term + kl_coef * k3(new || ref) - entropy_coef * entropy. With
    teacher_coef the policy term uses the advantages of ``losses.add_teacher_kl``.

    Arguments as in ``algo.losses``, all [R]; ``num_samples`` is the batch's. Raises ValueError when a term
    with a non-zero coefficient lacks its tensor, or the entropy its gradient.
    """
    teacher_stats: dict[str, Tensor] = {}
    if algorithm.needs_teacher:
        if teacher_logprobs is None:
            raise ValueError(
                f"algo.teacher_coef is {algorithm.teacher_coef} but teacher_logprobs is None; pass them"
            )
        advantages, teacher_stats = losses.add_teacher_kl(
            advantages, new_logprobs, teacher_logprobs, algorithm.teacher_coef
        )
    per_token = (new_logprobs, old_logprobs, advantages, weights)
    terms = _compute_policy_term(algorithm, *per_token, (sample_idx, num_samples), correction)
    total, stats = terms.total, terms.stats | teacher_stats
    if algorithm.needs_reference:
        if ref_logprobs is None:
            raise ValueError(f"algo.kl_coef is {algorithm.kl_coef} but ref_logprobs is None; pass them")
        kl = losses.reference_kl(new_logprobs, ref_logprobs, weights)
        total, stats = total + algorithm.kl_coef * kl.total, stats | kl.stats
    if algorithm.needs_entropy:
        if entropy is None or not entropy.requires_grad:
            raise ValueError(
                f"algo.entropy_coef is {algorithm.entropy_coef} but the entropy has no gradient; "
                "compute it with entropy_grad"
            )
        total = total - algorithm.entropy_coef * (weights * entropy).sum()
    return LossTerms(total, terms.count, stats)


def _find_idle_keys(choices: Algorithm) -> dict[str, str]:
    """{key: reason} of the keys that have no effect under the other choices."""
    has_clip = choices.loss in (Loss.CLIPPED, Loss.SEQUENCE_CLIPPED)
    is_truncated = choices.correction in (Correction.TOKEN_TRUNCATE, Correction.SEQUENCE_TRUNCATE)
    loss, correction = f"algo.loss is '{choices.loss}'", f"algo.correction is '{choices.correction}'"
    is_corrected = choices.correction is not Correction.NONE
    unused_rewards_rule = (choices.reward_coef == 0, "algo.reward_coef is 0")
    apart_rule = (
        choices.rewards is Rewards.APART,
        "algo.rewards is 'apart', which compares with the group",
    )
    rule_by_key = {
        "clip_low": (not has_clip, loss),
        "clip_high": (not has_clip, loss),
        "ratio_cap": (choices.loss is not Loss.CISPO, loss),
        **dict.fromkeys(("rewards", "overlong_buffer"), unused_rewards_rule),
        **dict.fromkeys(("baseline", "scale"), apart_rule if apart_rule[0] else unused_rewards_rule),
        "batch_pool": apart_rule
        if apart_rule[0]
        else (choices.scale is not Scale.BATCH, f"algo.scale is '{choices.scale}'"),
        "overlong_factor": (choices.overlong_buffer == 0, "algo.overlong_buffer is 0"),
        "overlong_scope": (choices.overlong_buffer == 0, "algo.overlong_buffer is 0"),
        "correction_low": (is_truncated or not is_corrected, correction),
        "correction_high": (not is_corrected, correction),
        "anchor": (is_corrected or choices.loss is Loss.REINFORCE, correction if is_corrected else loss),
    }
    return {key: reason for key, (is_idle, reason) in rule_by_key.items() if is_idle}


def _parse_value(key: str, value: Any) -> Any:
    """``value`` in the type of the field ``key``. Raises ValueError for another type, an unknown choice, and
    an own loss that cannot be used."""
    default = getattr(_DEFAULTS, key)
    if key == "loss" and ":" in str(value):
        return load_loss(value)
    if isinstance(default, StrEnum):
        choices = [str(choice) for choice in type(default)]
        if value not in choices:
            name_hint = f"that is an algo.name, known: {', '.join(choices)}"
            hint = name_hint if value in NAMED else _suggest_nearest(str(value), choices)
            hint += ', or one of your own, "file.py:function"' if key == "loss" else ""
            raise ValueError(f"algo.{key} is {value!r}; {hint}")
        return type(default)(value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"algo.{key} is {value!r}; use true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"algo.{key} is {value!r}; use a number")
    return float(value)


def _find_key_of_choice(value: str) -> str:
    """The key that has ``value`` among its choices; "" where there is none."""
    defaults = ((field.name, getattr(_DEFAULTS, field.name)) for field in dataclasses.fields(Algorithm))
    enums = ((key, type(default)) for key, default in defaults if isinstance(default, StrEnum))
    return next((key for key, choices in enums if value in map(str, choices)), "")


def _explain_foreign_key(key: str, loss: Any) -> str:
    """A hint with our name for a key of another trainer; empty for other keys. By spelling alone, our name
    closest to TRL's epsilon_high would be correction_high."""
    if loss == Loss.CISPO and key.startswith("epsilon"):  # its epsilon_high is the cap itself
        return f"TRL's {key} " + ("is ratio_cap here" if key == "epsilon_high" else "does nothing in CISPO")
    return key_hint(key)


def _suggest_nearest(name: str, names: Any) -> str:
    """A hint with the name closest to ``name``, if there is one, and all ``names``."""
    close_names = difflib.get_close_matches(name, list(names), n=1)
    hint = f"did you mean {close_names[0]!r}? " if close_names else ""
    return f"{hint}known: {', '.join(names)}"


_DEFAULTS = Algorithm()
