"""Prints the interfaces of the package on the path, which semantic versions cover, as JSON.

A script, so that it can run on another version of the package:

- `offered`: what a later version must still have;
- `required`: what a caller must give; a later version must not require more of it.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.main import cli
from outbox.config import field_names, variable_of
from outbox_api.openapi import document
from outbox_api.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODULES = (
    *("outbox", "outbox.sync", "outbox.django", "outbox.alembic", "outbox.fastapi"),
    *("outbox.receiver", "outbox.testing"),
)


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and those below it, by the words that call them."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, f"{path} {name}")


def command_names(*, only_required: bool) -> Iterator[str]:
    """Commands, arguments and flags; or the required arguments and flags."""
    for path, command in commands(cli, "outbox"):
        if not only_required:
            yield path
        for parameter in command.params:
            if not only_required or parameter.required:
                for flag in (*parameter.opts, *parameter.secondary_opts):
                    yield f"{path} {flag}"


def fields(
    schema: Mapping[str, Any],
    shared: Mapping[str, Any],
    path: str,
    *,
    only_required: bool,
    seen: tuple[str, ...] = (),
) -> Iterator[str]:
    """The fields of a JSON schema, recursively."""
    if reference := schema.get("$ref"):
        if reference in seen:
            return
        schema, seen = shared[reference.rpartition("/")[2]], (*seen, reference)
    inner: list[tuple[str, Any]] = []
    for name, field in schema.get("properties", {}).items():
        if not only_required or name in schema.get("required", ()):
            yield f"{path}.{name}"
            inner.append((f"{path}.{name}", field))
    forms = (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items"))
    inner += [(path, form) for form in forms if isinstance(form, dict)]
    for name, form in inner:
        yield from fields(form, shared, name, only_required=only_required, seen=seen)


def api_names(*, only_required: bool) -> Iterator[str]:
    """Routes, parameters, and fields of bodies and responses; or the required ones of requests."""
    api = document(ROUTES)
    shared = api["components"]["schemas"]
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            route = f"{method.upper()} {path}"
            bodies = {"body": operation.get("requestBody", {})}
            if not only_required:
                yield route
                bodies |= operation["responses"]
            for parameter in operation["parameters"]:
                if not only_required or parameter.get("required"):
                    yield f"{route} {parameter['in']} {parameter['name']}"
            for name, body in bodies.items():
                for content in body.get("content", {}).values():
                    yield from fields(
                        content["schema"], shared, f"{route} {name}", only_required=only_required
                    )


def python_names() -> Iterator[str]:
    """The public names of the public modules."""
    for name in MODULES:
        module = import_module(name)
        defined = (key for key, value in vars(module).items() if _is_of(value, name))
        for each in getattr(module, "__all__", defined):
            yield f"{name}.{each}"


def _is_of(value: object, module: str) -> bool:
    return getattr(value, "__module__", None) == module


if __name__ == "__main__":
    offered = {
        *command_names(only_required=False),
        *(variable_of(name) for name in field_names().values()),
        *api_names(only_required=False),
        *python_names(),
    }
    required = {*command_names(only_required=True), *api_names(only_required=True)}
    print(json.dumps({"offered": sorted(offered), "required": sorted(required)}))
