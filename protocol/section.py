"""What all sections of a run's configuration are: frozen, typed, and without a key that is not known."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """The base of each. Numbers are finite, and no value is of a type that is only nearly right."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
