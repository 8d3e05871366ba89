"""What a run begins with: its buffer of rollouts, and the groups that an earlier process had on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.pipeline.buffer import AdmissionRule, RolloutBuffer
from ostinato.pipeline.rounds import Rounds
from ostinato.pipeline.spool import Spool
from ostinato.pipeline.state import LoopState, Plan
from ostinato.pipeline.stream import find_solved
from ostinato.protocols import Tasks
from ostinato.rollout.rollout import RolloutContext
from ostinato.types import Group


def new_buffer(
    plan: Plan,
    state: LoopState,
    *,
    tasks: Tasks,
    stage: RolloutContext,
    spool: Spool,
    on_progress: Callable[[], None],
) -> RolloutBuffer:
    """The buffer of a run that stands at ``state``."""

    def leaving(groups: Sequence[Group], retired: Sequence[str]) -> Sequence[str]:
        rule = {"share": plan.recipe.rollout.solved_for_good, "solved_at": plan.solved_at}
        return find_solved(groups, **rule, retired=frozenset(retired))

    rounds = Rounds(
        tasks=tasks,
        stage=stage,
        spool=spool,
        prompts=plan.recipe.rollout.prompts_per_step,
        group_size=plan.recipe.rollout.group_size,
        seed=plan.recipe.seed,
        staleness=plan.recipe.pipeline.staleness,
    )
    return RolloutBuffer(
        rule=AdmissionRule(
            prompts=plan.recipe.rollout.prompts_per_step,
            staleness=plan.recipe.pipeline.staleness,
            steps=plan.recipe.trainer.steps,
            overlap=plan.recipe.pipeline.overlap,
        ),
        rounds=rounds,
        cursor=state.cursor,
        retired=state.retired,
        leaving=leaving if plan.recipe.rollout.solved_for_good else None,
        on_progress=on_progress,
    )


def recall(buffer: RolloutBuffer, state: LoopState, spool: Spool) -> str:
    """Restore the groups that an earlier process had in flight. Those that the spool does not have are played
    again in their places by the current policy; prompts that lost groups had retired stay retired. Returns a
    sentence where that changes the run, else ""."""
    lost = [one.version for one in buffer.recall(state.ahead, state.step, state.version)]
    if not (gone := sorted({version for version in lost if version != state.version})):
        return ""
    who = f"policy {gone[0]}" if len(gone) == 1 else f"policies {gone[0]} to {gone[-1]}"
    return (
        f"step {state.step}: of {len(state.ahead)} groups that were on their way "
        f"{spool.path.name} does not have {len(lost)}, which {who} sampled; policy "
        f"{state.version} plays them anew, so this is not quite the run that was interrupted"
    )
