"""The program uses no private names of libraries, which their minor versions may change."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.repository.sources import OWN, PROGRAM, ROOT, nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

UNCHECKED = {*OWN, *sys.stdlib_module_names}
KNOWN = {
    "outbox/django/publishing.py": ["getattr(_from_testcase)"],
    # Neither client lets its caller open the connection, where the egress policy is asked.
    # Neither library bounds what a server's bytes cost.
    "packages/brokers/outbox_brokers/rabbitmq/frames.py": ["rstream.encoding._decode_struct"],
    "packages/brokers/outbox_brokers/nats/connection.py": [
        "_Client._process_headers overrides nats's",
        "_Client._process_info overrides nats's",
        "_Client._ps overrides nats's",
        "_SocketTransport._bare_io_reader overrides nats's",
        "_SocketTransport._io_writer overrides nats's",
        "_SocketTransport._io_reader overrides nats's",
        "_SocketTransport._bare_io_writer overrides nats's",
        "._pending",
        "._pending_data_size",
        "._server_info",
    ],
    "packages/brokers/outbox_brokers/redis/connection.py": [
        "_OwnStreams._reader overrides redis's",
        "_OwnStreams._connect overrides redis's",
        "_OwnStreams._writer overrides redis's",
    ],
    "packages/brokers/outbox_brokers/nats/source.py": ["client._transport"],
    "outbox/store/connection/connect.py": ["getattr(_transport)"],
    "outbox/store/connection/pgbouncer.py": [
        "PooledWorker._cancel_current_command overrides asyncpg's"
    ],
    "outbox/store/connection/type_cache.py": [
        "TypeCachingConnection._introspect_types overrides asyncpg's"
    ],
}
"""The comments there say why."""
PUBLIC = {"KafkaError"}
"""Classes with public names that begin with an underscore: librdkafka's own errors have one."""
DOCUMENTED = {"_exit", "_make", "_meta", "_replace", "_state"}
"""Documented attributes that begin with an underscore: of os, named tuples, Django's models."""


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
                | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store())
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
            if root not in UNCHECKED:
                libraries[name] = root
                private += [path] if any(is_private(each) for each in rest) else []
    return libraries, private


def base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split(".")[0].split("[")[0] for base in node.bases]


def derived_classes(trees: Iterable[Sequence[ast.AST]]) -> dict[str, str]:
    """Return which library each class of the program derives from, by the class's name."""
    bases: dict[str, list[str]] = {}
    derived: dict[str, str] = {}
    for tree in trees:
        libraries, _ = library_names(tree)
        for node in tree:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = base_names(node)
                for base in bases[node.name]:
                    if base in libraries:
                        derived[node.name] = libraries[base]
    while more := {
        name: derived[base]
        for name, of in bases.items()
        for base in of
        if base in derived and name not in derived
    }:
        derived |= more
    return derived


def attribute_names(call: ast.Call) -> list[str]:
    """The names of attributes in a call that takes them as strings."""
    match call:
        case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"), args=args):
            names = args[1:2]
        case ast.Call(func=ast.Name(id="attrgetter") | ast.Attribute(attr="attrgetter")):
            names = call.args
        case _:
            return []
    texts = [each.value for each in names if isinstance(each, ast.Constant)]
    return [part for text in texts for part in str(text).split(".")]


def is_super(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="super")):
            return True
    return False


def private_uses(tree: Sequence[ast.AST], own: set[str], derived: Mapping[str, str]) -> list[str]:
    """Return the private names of libraries that a module uses.

    Of another object than `self`, a private name is the program's own only in the module that
    defines it.

    Args:
        tree: its code.
        own: the private names that the program defines.
        derived: the libraries of its classes, from `derived_classes`.
    """
    libraries, found = library_names(tree)
    here = {*names_defined(tree), *DOCUMENTED}
    for node in tree:
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                of = value.id if isinstance(value, ast.Name) else ""
                if of in PUBLIC:
                    continue
                known = own if of in ("self", "cls") or is_super(value) else here
                if name not in known or of in libraries:
                    found.append(f"{of}.{name}")
            case ast.Call():
                names = filter(is_private, attribute_names(node))
                found += [f"{ast.unparse(node.func)}({name})" for name in names]
            case ast.ClassDef(name=name):
                for of in base_names(node):
                    library = libraries.get(of) or derived.get(of)
                    private = set(names_defined(ast.walk(node)))
                    if library is not None and private:
                        common = defined_by(library, private)
                        found += [f"{name}.{each} overrides {library}'s" for each in common]
    return found


@pytest.mark.slow
def test_no_private_names_of_libraries_are_used() -> None:
    trees = {path: nodes(path) for path in PROGRAM}
    own = {name for tree in trees.values() for name in names_defined(tree)}
    derived = derived_classes(trees.values())
    uses = {
        str(path.relative_to(ROOT)): found
        for path, tree in trees.items()
        if (found := private_uses(tree, own, derived))
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
        "def close(client): client._messages = []",
        "def busy(each): return getattr(each, '_messages', None)",
        "def reset(each): setattr(each, '_messages', [])",
        "def busy(each): return hasattr(each, '_messages')",
        "def reset(each): delattr(each, '_messages')",
        "import operator\nMESSAGES = operator.attrgetter('size', 'handler._messages')",
        "class Own(Handler):\n    def close(self): self._messages = []",
    ],
)
def test_a_private_name_of_a_library_is_found(source: str) -> None:
    own = {"_handle_request", "_messages"}
    assert private_uses(nodes_of(source), own, {"Handler": "aiohttp"})


@pytest.mark.parametrize(
    "source",
    [
        "class Own:\n    def __eq__(self, other): return self._name == other._name\n"
        "    def __init__(self): self._name = ''",
        "def busy(each): return getattr(each, 'name', '_none')._replace(size=1)",
    ],
)
def test_own_and_documented_names_are_allowed(source: str) -> None:
    assert not private_uses(nodes_of(source), {"_name"}, {})


def test_a_class_of_the_program_derives_from_the_library_of_its_bases() -> None:
    sources = ["class C(B): ...", "class B(A): ...", "from aiohttp import web\nclass A(web.X): ..."]
    derived = derived_classes(nodes_of(source) for source in sources)
    assert derived == {"A": "aiohttp", "B": "aiohttp", "C": "aiohttp"}
