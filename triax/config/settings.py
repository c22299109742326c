"""The common manner of all settings: frozen, strict, documented field by field."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every settings table: unknown keys are refused and values never change after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
