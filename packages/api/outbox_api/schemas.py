"""JSON schemas of responses, generated from the dataclasses of `outbox.operations`.

Field docstrings of the dataclasses become the descriptions in the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter

from outbox.core.model.api_token import Scope
from outbox.core.model.endpoint_settings import Section

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaMode

NAMES: dict[str, Any] = {
    each.__name__: each for each in (Mapping, Sequence, datetime, timedelta, UUID)
} | {"Any": Any, "Scope": Scope, "Section": Section}
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


def json_schemas(
    forms: Mapping[str, tuple[Any, JsonSchemaMode]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generate the JSON schemas of types, and their shared definitions.

    Args:
        forms: type and mode (validation or serialization) by name.
    """
    inputs = [(name, mode, adapter(form)) for name, (form, mode) in forms.items()]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    whole = {"found": [[name, schema] for (name, _), schema in found.items()], "shared": shared}
    # pydantic prefixes ambiguous class names with the module path; shorten it to the module name.
    text = re.sub(
        r"outbox(?:__\w+?)*?__(\w+?)__([A-Z]\w+)",
        lambda match: match[1].rpartition("__")[2].title().replace("_", "") + match[2],
        orjson.dumps(whole).decode(),
    )
    short = orjson.loads(text)
    return dict(short["found"]), short["shared"].get("$defs", {})
