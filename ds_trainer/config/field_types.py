"""The base class of every section of a run's JSON, and the types that its fields share. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# The upper bounds are beyond any real run; a slip of the keyboard ends here and not in a C++ conversion error.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
BatchSize = Annotated[int, Field(gt=0, le=10**6)]
Elements = Annotated[int, Field(gt=0, le=10**12)]
ElementsOrZero = Annotated[int, Field(ge=0, le=10**12)]
Threshold = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Elements; DeepSpeed's own "no bound" is the largest int64."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Ranks = Annotated[int, Field(gt=0, le=10**6)]
Seconds = Annotated[float, Field(gt=0.0, le=10**6)]
Name = Annotated[str, Field(min_length=1)]
Paths = Name | Annotated[tuple[Name, ...], Field(min_length=1)]


class Section(BaseModel):
    """A frozen section that knows only its own keys and does not turn "8" into 8."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
