"""JSON schemas of requests and responses, in a form that generators of clients take literally.

Field docstrings of the dataclasses of `outbox.operations` become the descriptions in the OpenAPI
document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from outbox.core.model.api_token import Scope
from outbox.core.model.setting import Section
from outbox.operations.deliveries.model import DeliveryState
from outbox.operations.events.future import FutureEvent

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaMode
    from pydantic_core import core_schema

NAMES: dict[str, Any] = {
    each.__name__: each for each in (FutureEvent, Mapping, Sequence, datetime, timedelta, UUID)
} | {"Any": Any, "DeliveryState": DeliveryState, "Scope": Scope, "Section": Section}
"""Names that the dataclasses import under TYPE_CHECKING only."""


def adapter(form: Any) -> TypeAdapter[Any]:
    """Return a type adapter with resolved forward references."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        form.model_rebuild(_types_namespace=NAMES)
    if hasattr(form, "__dataclass_fields__"):
        # The dataclasses in its fields inherit this.
        form.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True)
    made: TypeAdapter[Any] = TypeAdapter(form)
    made.rebuild(force=True, _types_namespace=NAMES)
    return made


class _Schemas(GenerateJsonSchema):
    """Schemas without titles of fields, whose responses have all fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> dict[str, Any]:
        if self.mode == "serialization":
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def union_schema(self, schema: core_schema.UnionSchema) -> dict[str, Any]:
        """Alternatives that are objects exclude each other."""
        union = super().union_schema(schema)
        if all("$ref" in each for each in union.get("anyOf", [{}])):
            union["oneOf"] = union.pop("anyOf")
        return union

    def tuple_schema(self, schema: core_schema.TupleSchema) -> dict[str, Any]:
        """Generators know the items of an array by `items` only, and some refuse both."""
        array = super().tuple_schema(schema)
        if forms := array.pop("prefixItems", None):
            distinct = [form for n, form in enumerate(forms) if form not in forms[:n]]
            array["items"] = {"anyOf": distinct} if len(distinct) > 1 else distinct[0]
        return array


def _without_defaults(schema: Any) -> Any:
    """Move the default of each field into its description.

    A generated client sends the defaults that it finds, or requires its caller to send a field
    that has one.
    """
    if isinstance(schema, list):
        return [_without_defaults(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _without_defaults(each) for name, each in schema.items()}
    for field in made.get("properties", {}).values():
        default = field.pop("default", None)
        if default not in (None, []):
            text = field.get("description", "")
            field["description"] = f"{text}  Default: {orjson.dumps(default).decode()}.".strip()
    return made


def json_schemas(
    forms: Mapping[str, tuple[Any, JsonSchemaMode]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generate the JSON schemas of types, and their shared definitions.

    Args:
        forms: type and mode (validation or serialization) by name.
    """
    inputs = [(name, mode, adapter(form)) for name, (form, mode) in forms.items()]
    found, shared = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_Schemas
    )
    whole = _without_defaults(
        {"found": [[name, schema] for (name, _), schema in found.items()], "shared": shared}
    )
    # pydantic prefixes ambiguous class names with the module path; shorten it to the module name.
    text = re.sub(
        r"outbox(?:__\w+?)*?__(\w+?)__([A-Z]\w+)",
        lambda match: match[1].rpartition("__")[2].title().replace("_", "") + match[2],
        orjson.dumps(whole).decode(),
    )
    short = orjson.loads(text)
    return dict(short["found"]), short["shared"].get("$defs", {})
