"""The base of all records."""

from pydantic import BaseModel, ConfigDict


class FrozenRecord(BaseModel):
    """A record that nothing changes once it is made. It refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
