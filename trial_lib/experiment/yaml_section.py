"""The base of every mapping in an experiment's YAML, and the fields that are accepted without effect."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class _NotUsed:
    """Marks a field that only Determined's cluster needs."""


NotUsed = Annotated[Any, _NotUsed()]
"""A field that is accepted, so that an existing file works, and has no effect."""


class YamlSection(BaseModel):
    """A mapping in the YAML. It refuses unknown keys and wrong types, and converts nothing silently.

    A known key without a value counts as absent, as in the files that Determined writes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_left_out(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: item for key, item in value.items() if item is not None or key not in cls.model_fields}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the section's schema. Every optional key may also have no value."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and not _takes_anything(field):
                schema["properties"][name] = _or_nothing(field)
        return schema

    def not_used(self) -> Iterator[str]:
        """Yields the dotted keys that are set and have no effect, such as `resources.resource_pool`."""
        for name in sorted(self.model_fields_set):
            field = type(self).model_fields.get(name)
            value = getattr(self, name)
            if field is not None and any(isinstance(mark, _NotUsed) for mark in field.metadata):
                yield name
            elif isinstance(value, YamlSection):
                yield from (f"{name}.{key}" for key in value.not_used())


_AROUND_A_TYPE = ("default", "description", "title")


def _takes_anything(field: JsonSchemaValue) -> bool:
    return not field.keys() - set(_AROUND_A_TYPE)


def _or_nothing(field: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema of a field whose value may also be missing."""
    nothing = {"type": "null"}
    around = {key: value for key, value in field.items() if key in _AROUND_A_TYPE}
    kinds = field.get("anyOf") or [{key: value for key, value in field.items() if key not in around}]
    return {"anyOf": kinds if nothing in kinds else [*kinds, nothing], **around}
