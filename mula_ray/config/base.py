"""The base of every configuration section: frozen, strict, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the configuration tree. Validators only refuse; they never change a value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
