"""The program uses no private names of libraries, which their minor versions may change."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.repository.sources import PROGRAM, ROOT, nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

OWN = {"outbox", *sys.stdlib_module_names}
KNOWN = {
    # Neither client lets its caller open the connection, where the egress policy is asked.
    "outbox/destinations/nats/connection.py": [
        "_SocketTransport._bare_io_reader overrides nats's",
        "_SocketTransport._io_writer overrides nats's",
        "_SocketTransport._io_reader overrides nats's",
        "_SocketTransport._bare_io_writer overrides nats's",
        "._server_info",
    ],
    "outbox/destinations/redis/connection.py": [
        "_OwnStreams._reader overrides redis's",
        "_OwnStreams._connect overrides redis's",
        "_OwnStreams._writer overrides redis's",
    ],
    "outbox/store/connection/type_cache.py": [
        "TypeCachingConnection._introspect_types overrides asyncpg's"
    ],
}
"""The comments there say why."""
PUBLIC = {"KafkaError"}
"""Classes with public names that begin with an underscore: librdkafka's own errors have one."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def names_defined(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Private names of functions, classes, variables and attributes which the code defines."""
    for node in tree:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Constant(value=str(name))  # Of `__slots__`.
            ) if is_private(name):
                yield name


@cache
def sources_of(library: str) -> tuple[bytes, ...]:
    spec = importlib.util.find_spec(library)
    assert spec is not None
    if not spec.submodule_search_locations:
        files = [Path(str(spec.origin))]
    else:
        files = [
            each for path in spec.submodule_search_locations for each in Path(path).rglob("*.py")
        ]
    return tuple(each.read_bytes() for each in files)


def defined_by(library: str, names: set[str]) -> set[str]:
    """Return which of these private names the library's source defines."""
    # Parsing takes long, and most files contain none of the names.
    those = [name.encode() for name in names]
    return {
        name
        for source in sources_of(library)
        if any(each in source for each in those)
        for name in names_defined(nodes_of(source))
        if name in names
    }


def library_names(tree: Sequence[ast.AST]) -> tuple[dict[str, str], list[str]]:
    """Return which library each imported name is of, and imports of private names."""
    libraries: dict[str, str] = {}
    private = []
    for node in tree:
        match node:
            case ast.Import(names=names):
                paths = [(each.name, each.asname or each.name.split(".")[0]) for each in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                paths = [(f"{module}.{each.name}", each.asname or each.name) for each in names]
            case _:
                continue
        for path, name in paths:
            root, *rest = path.split(".")
            if root not in OWN:
                libraries[name] = root
                private += [path] if any(is_private(each) for each in rest) else []
    return libraries, private


def private_uses(tree: Sequence[ast.AST], own: set[str]) -> list[str]:
    """Return the private names of libraries that a module uses.

    Args:
        tree: its code.
        own: the private names that the program defines.
    """
    libraries, found = library_names(tree)
    for node in tree:
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                of = value.id if isinstance(value, ast.Name) else ""
                if of in PUBLIC:
                    continue
                if name not in own or of in libraries:
                    found.append(f"{of}.{name}")
            case ast.ClassDef(name=name, bases=bases):
                for base in bases:
                    of = ast.unparse(base).split(".")[0].split("[")[0]
                    library = libraries.get(of)
                    private = set(names_defined(ast.walk(node)))
                    if library is not None and private:
                        common = defined_by(library, private)
                        found += [f"{name}.{each} overrides {library}'s" for each in common]
    return found


def test_no_private_names_of_libraries_are_used() -> None:
    own = {name for path in PROGRAM for name in names_defined(nodes(path))}
    uses = {
        str(path.relative_to(ROOT)): found
        for path in PROGRAM
        if (found := private_uses(nodes(path), own))
    }
    assert {path: sorted(found) for path, found in uses.items()} == {
        path: sorted(found) for path, found in KNOWN.items()
    }


@pytest.mark.parametrize(
    "source",
    [
        "from aiohttp.web_protocol import _ErrInfo",
        "import aiohttp._websocket",
        "def busy(each): return each._request_in_progress",
        "from aiohttp import web\nprint(web._handle_request)",
        "from aiohttp import web\nclass Own(web.RequestHandler):\n"
        "    async def _handle_request(self): ...",
        "from aiohttp import web\nclass Own(web.RequestHandler):\n"
        "    def close(self): self._messages = []",
    ],
)
def test_a_private_name_of_a_library_is_found(source: str) -> None:
    assert private_uses(nodes_of(source), {"_handle_request", "_messages"})
