"""The base of all records."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler

# A longer integer is nothing that ZeroTune has written. No float and no array can hold it.
_LARGEST = 2**63 - 1

Seconds = Annotated[float, Field(gt=-(2.0**37), lt=2.0**37, allow_inf_nan=False)]
"""A duration, or seconds since the epoch, that a calendar can show."""


def _bound(schema: Any) -> None:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for part in parts:
        _bound(part)
    if isinstance(schema, dict) and schema.get("type") == "int":
        if "gt" not in schema:
            schema.setdefault("ge", -_LARGEST)
        if "lt" not in schema:
            schema.setdefault("le", _LARGEST)


class FrozenRecord(BaseModel):
    """A record that does not change once it is made. It refuses unknown keys, and integers of more than 64 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Bounds the integers of all fields, because a file that is read back may contain any."""
        schema = handler(source)
        _bound(schema)
        return schema
