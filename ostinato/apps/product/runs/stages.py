"""What each stage of the loop does; ``collect`` is the loop's own."""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.apps.product.loop import Stage
from ostinato.apps.product.runs import judge, policy
from ostinato.apps.product.runs.loop import Work

STAGES: Mapping[Stage, Work] = {
    Stage.FREEZE: judge.freeze_window,
    Stage.JUDGE: judge.train,
    Stage.JUDGE_GATES: judge.gates,
    Stage.SHADOW: judge.shadow,
    Stage.POLICY: policy.train,
    Stage.POLICY_GATES: policy.gates,
    Stage.CANARY: policy.canary,
}

__all__ = ["STAGES"]
