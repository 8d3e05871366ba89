"""product.toml: what the continual loop works on, and when it moves on. Every value exists once, here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ostinato.apps.product.gates import JudgeLimits, PolicyLimits
from ostinato.config.explain import explain
from ostinato.config.fields import Seed
from ostinato.config.recipe import beside_recipes, override
from ostinato.inputs import parse_toml

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CollectSettings(_Section):
    """A window is complete with ``pairs`` decided pairs, after an alarm with ``refresh_pairs``."""

    pairs: Positive = 200
    refresh_pairs: Positive = 50
    test_share: Share = 0.2  # the last part of a window by time; as much before it is for validation
    by_user: bool = True  # no user is in two parts; False: for a product with few users
    look_s: float = Field(default=5.0, gt=0)  # between two looks into the store


class JudgeSettings(_Section):
    """How a candidate judge is trained: ``ostinato judge train`` with these overrides."""

    base: str = ""  # the adapter that the first one begins with; "": the product's model
    template: Path | None = None  # what a judge reads
    overrides: tuple[str, ...] = ()
    warm: bool = True  # False: RL alone, where the base writes verdicts already
    earlier_rounds: int = Field(default=3, ge=0)  # whose training pairs are shown again
    bank_copies: Positive = 4  # of each exemplar of the hack bank among the rows
    by_gold: bool = False  # True: its gates go by gold's labels of the pairs, not by users' (docs/product.md)
    limits: JudgeLimits = JudgeLimits()
    later_pairs: int = Field(default=40, ge=0)  # decided behind the window: its gates wait for so many


class PolicySettings(_Section):
    """How a candidate policy is trained: ``ostinato train`` with the judge as its reward."""

    recipe: str  # its evaluation, judged without the judge, is the ability that has to stay
    base: str = ""  # the adapter that the product begins with; "": its model
    ability: tuple[str, ...] = ("exact",)  # reward functions of that evaluation
    overrides: tuple[str, ...] = ()
    steps: Positive = 60
    look_every: Positive = 5  # steps between two looks of the detectors
    behind: Positive = 2  # looks back, to the policy that a look compares with; first the current one
    limits: PolicyLimits = PolicyLimits()
    gate_prompts: Positive = 128  # for ability and gold at the gates
    probe: Positive = 64  # prompts of a look: answered afresh by the policy that learns and by the other
    counted: tuple[str, ...] = (
        "invalid",
        "question",
        "refusal",
        "empty",
    )  # actions that must not become usual
    false_alarms: Share = 0.02  # nominal: the chance that detectors stop a run of ``steps`` without cause


class CanarySettings(_Section):
    share: Share = 0.1  # of users
    answers: Positive = 200  # with a decided reward, in the canary's arm
    worse: float = Field(default=0.0, ge=0)  # the most by which its mean reward may be below control's


class ProductSettings(_Section):
    """``gold``: a reward function ("file.py:function", TRL's signature) that stands for the
    true objective: a panel, or a stronger judge of another family. Detectors and gates use it. It trains the
    judge only through the hack bank, by pairs about which it disagrees with the judge."""

    model: str
    store: str
    rewards: Path = Field(default_factory=lambda: beside_recipes("product/rewards.toml"))
    gold: str = ""
    bank: Path | None = None  # known exploits: rows as of ``window.read_bank``
    seed: Seed = 0
    collect: CollectSettings = CollectSettings()
    judge: JudgeSettings = JudgeSettings()
    policy: PolicySettings
    canary: CanarySettings = CanarySettings()

    @model_validator(mode="after")
    def _check_gold(self) -> ProductSettings:
        if self.judge.by_gold and not self.gold:
            raise ValueError("judge.by_gold is true and gold is ''; name the function that stands for gold")
        return self


def read_settings(file: Path, *overrides: str) -> ProductSettings:
    """Read product.toml. ``overrides``: "section.key=value" with TOML values. Raises ValueError for a missing
    file, and for a faulty field, which it names."""
    if not file.is_file():
        raise ValueError(f"there is no {file}; docs/product.md has one to begin with")
    tree = override(parse_toml(file.read_text(encoding="utf-8")), overrides)
    try:
        return ProductSettings.model_validate(tree)
    except ValidationError as error:
        raise ValueError(f"{file}: {explain(error, ProductSettings, 'a product')}") from None
