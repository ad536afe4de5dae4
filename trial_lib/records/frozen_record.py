"""The base of all records."""

from pydantic import BaseModel, ConfigDict


class FrozenRecord(BaseModel):
    """A record that does not change once it is made. It refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
