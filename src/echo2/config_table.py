"""What every table of the configuration is made of: the base class and its number types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1, le=2**31)]
NonNegative = Annotated[int, Field(ge=0, le=2**31)]


class Table(BaseModel):
    """One TOML table: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
