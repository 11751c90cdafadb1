"""The forms of answers, made of the types that the answers are made of.

So there is one description of a thing, where it is read from the database, and
what it says of its fields is what the document says.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, get_type_hints
from uuid import UUID

import orjson
from pydantic import BaseModel, TypeAdapter, create_model

from outbox.api.route import Shown
from outbox.core.model.api_token import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic.json_schema import JsonSchemaMode

NAMES: dict[str, Any] = {
    each.__name__: each for each in (Mapping, Sequence, datetime, timedelta, UUID)
} | {"Any": Any, "Scope": Scope}
"""What our types import for type checkers alone."""


def joined(name: str, *parts: type, without: Iterable[str] = (), **more: Any) -> type[Shown]:
    """The form of what `outbox.operations.views.merge.flat` makes of such objects.

    Args:
        more: fields beside theirs, or in the place of theirs, with their types.
    """
    fields: dict[str, Any] = {}
    for part in parts:
        hints = get_type_hints(part, vars(sys.modules[part.__module__]), NAMES)
        fields |= {
            field: (hint, ...)
            for field, hint in hints.items()
            if field in part.__slots__ and field not in without  # type: ignore[attr-defined]
        }
    fields |= {field: (hint, ...) for field, hint in more.items()}
    return create_model(name, __base__=Shown, __doc__=inspect.getdoc(parts[0]), **fields)


def adapter(form: Any) -> TypeAdapter[Any]:
    """What knows the JSON schema of a form."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        form.model_rebuild(_types_namespace=NAMES)
    made: TypeAdapter[Any] = TypeAdapter(form)
    made.rebuild(force=True, _types_namespace=NAMES)
    return made


def schemas(
    forms: Mapping[str, tuple[Any, JsonSchemaMode]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schemas of forms, and the definitions that they share.

    Args:
        forms: by a name of the caller's; with what is asked for: what goes in or comes out.
    """
    inputs = [(name, mode, adapter(form)) for name, (form, mode) in forms.items()]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    whole = {"found": [[name, schema] for (name, _), schema in found.items()], "shared": shared}
    # Where two are called the same, pydantic puts the module's whole path before them.
    text = re.sub(
        r"outbox(?:__\w+?)*?__(\w+?)__([A-Z]\w+)",
        lambda match: match[1].rpartition("__")[2].title().replace("_", "") + match[2],
        orjson.dumps(whole).decode(),
    )
    short = orjson.loads(text)
    return dict(short["found"]), short["shared"].get("$defs", {})
