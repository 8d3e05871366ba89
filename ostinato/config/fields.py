"""What sections of a recipe are made of: their base, and types of values with bounds or a kind of file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ostinato.config.paths import PathKind

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has arrays, not tuples
Rewards = Annotated[Names, PathKind.REWARD]
Overrides = Annotated[Names, PathKind.OVERRIDE]
Floats = Annotated[tuple[float, ...], Field(strict=False)]
Counts = Annotated[tuple[int, ...], Field(strict=False)]

File = Annotated[str, PathKind.FILE]
RowsName = Annotated[str, PathKind.ROWS]
ModelName = Annotated[str, PathKind.MODEL]
Code = Annotated[str, PathKind.CODE]
Program = Annotated[str, PathKind.PROGRAM]


class Section(BaseModel):
    """Frozen, typed without coercion (no "3" for 3), and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
