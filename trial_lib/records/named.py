"""A field that accepts the names in a table. Prefect's form offers them as a choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, eq=False)
class NameOf:
    """Makes a `str` field take the names of a table: `Annotated[str, NameOf("metric", SEARCH_METRICS)]`.

    The table is read when the field is. A new record in it is accepted at once.

    Attributes:
        what: the field, as an error calls it.
        table: the records by name.
    """

    what: str
    table: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns how pydantic reads the field."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns how a form shows it."""
        return {**handler(schema), "enum": list(self.table)}

    def _check(self, name: str) -> str:
        if name not in self.table:
            raise ValueError(f"the {self.what} must be one of {', '.join(self.table)} but is {name!r}")
        return name
