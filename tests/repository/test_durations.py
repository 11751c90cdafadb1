"""No test fails because the machine is busy.

A test neither asserts that something took less than five seconds of real time, nor waits less than
20 seconds for what must happen.  A test counts steps instead (calls, round trips, bytes), orders
events, or runs in virtual time; speed is measured by `benchmarks/`.  That something takes at least
some time may be asserted, and CPU time may be compared with the CPU time of other work.

Exempt are tests in virtual time (`run_virtual`), and waits whose end is expected
(`pytest.raises`, `suppress`).
"""

from __future__ import annotations

import ast
import operator
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest

from tests.repository.sources import ROOT, TESTS, nodes

if TYPE_CHECKING:
    from pathlib import Path

BAR_S_MIN = 5.0
WAIT_S_MIN = 20.0
FILES = [
    each
    for each in TESTS
    # The simulation's clock is virtual, and fuzzing has a loop of its own.
    if not {"sim", "fuzz"} & set(each.relative_to(ROOT).parts)
]
CLOCKS = {"monotonic", "perf_counter", "time"}
DURATIONS = {"elapsed_s"}
"""Attributes with measured durations."""
MENTIONED = re.compile(
    r"\b(until|until_sync|timeout|wait_for|monotonic|perf_counter|time|elapsed_s)\b"
)
"""A module without any of these words has nothing to find."""
EXPECTED = {"raises", "suppress"}
"""Context managers around a wait that may end without success."""
ENDS = {"Exception", "TimeoutError", "CONNECTION_ERRORS"}
"""Exceptions that a `try` around such a wait handles."""
OPERATORS = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Div: operator.truediv}


def parse(path: Path) -> ast.Module:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module


@lru_cache(None)
def constants(path: Path) -> dict[str, float]:
    """The numbers that a module has as constants, also imported ones."""
    found: dict[str, float] = {}
    for node in parse(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            source = ROOT.joinpath(*str(node.module).split(".")).with_suffix(".py")
            known = constants(source) if source.is_file() else {}
            found |= {a.asname or a.name: known[a.name] for a in node.names if a.name in known}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names, values = [target], [node.value]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    names, values = target.elts, node.value.elts
                for name, value in zip(names, values, strict=False):
                    number = evaluate(value, found)
                    if isinstance(name, ast.Name) and number is not None:
                        found[name.id] = number
    return found


def evaluate(node: ast.expr | None, known: dict[str, float]) -> float | None:
    """The number that an expression has; None: it is not known."""
    match node:
        case ast.Constant(value=bool() | None):
            return None
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return known.get(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = evaluate(left, known), evaluate(right, known)
            return None if a is None or b is None else OPERATORS[type(op)](a, b)
    return None


class Finder(ast.NodeVisitor):
    """Finds assertions about short durations, and short waits."""

    def __init__(self, known: dict[str, float], *, has_virtual_time: bool = True) -> None:
        self.known = known
        self.has_virtual_time = has_virtual_time
        self.found: list[tuple[int, str]] = []
        self._clocked: set[str] = set()
        """Variables with times of a clock."""
        self._measured: set[str] = set()
        """Variables with durations."""
        self._expected = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        is_virtual = self.has_virtual_time and any(
            isinstance(n, ast.Name) and n.id == "run_virtual" for n in ast.walk(node)
        )
        if not is_virtual:
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    self._assign(name.id, value)
        self.generic_visit(node)

    def _assign(self, name: str, value: ast.expr) -> None:
        self._measured.discard(name)
        if self._is_measured(value):
            self._measured.add(name)
        elif self._is_clocked(value):
            self._clocked.add(name)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
                self._assign(name, value) if self._is_measured(value) else None
            case ast.Call(func=ast.Name(id="until" | "until_sync")):
                self._check_wait(node, 1, "timeout_s")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio"), attr="timeout")):
                self._check_wait(node, 0, "delay")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio"), attr="wait_for")):
                self._check_wait(node, 1, "timeout")
        self.generic_visit(node)

    def _check_wait(self, node: ast.Call, place: int, keyword: str) -> None:
        values = [*node.args[place : place + 1]]
        values += [each.value for each in node.keywords if each.arg == keyword]
        limit_s = evaluate(values[0], self.known) if values else None
        if limit_s is not None and limit_s < WAIT_S_MIN and not self._expected:
            self.found.append((node.lineno, f"waits at most {limit_s:g} s"))

    def visit_Try(self, node: ast.Try) -> None:
        handled = any(
            isinstance(n, ast.Name) and n.id in ENDS
            for each in node.handlers
            for n in ast.walk(each.type or ast.Name("Exception"))
        )
        self._expected += handled
        for each in node.body:
            self.visit(each)
        self._expected -= handled
        for each in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(each)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        names = {
            getattr(each.context_expr.func, "attr", getattr(each.context_expr.func, "id", ""))
            for each in node.items
            if isinstance(each.context_expr, ast.Call)
        }
        self._expected += bool(names & EXPECTED)
        self.generic_visit(node)
        self._expected -= bool(names & EXPECTED)

    visit_AsyncWith = visit_With  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> None:
        for each in ast.walk(node.test):
            if isinstance(each, ast.Compare):
                self._check_comparison(each)
        self.generic_visit(node)

    def _check_comparison(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            if isinstance(op, ast.Lt | ast.LtE):
                duration, limit = left, right
            elif isinstance(op, ast.Gt | ast.GtE):
                duration, limit = right, left
            else:
                continue
            limit_s = evaluate(limit, self.known)
            if limit_s is not None and limit_s < BAR_S_MIN and self._is_measured(duration):
                self.found.append((node.lineno, f"asserts less than {limit_s:g} s"))

    def _is_clocked(self, node: ast.expr) -> bool:
        return any(
            (isinstance(n, ast.Call) and not n.args and _attribute(n.func) in CLOCKS)
            or (isinstance(n, ast.Name) and n.id in self._clocked)
            for n in ast.walk(node)
        )

    def _is_measured(self, node: ast.expr) -> bool:
        return any(
            (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) and self._is_clocked(n))
            or (isinstance(n, ast.Name) and n.id in self._measured)
            or _attribute(n) in DURATIONS
            for n in ast.walk(node)
        )


def _attribute(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def find(text: str, known: dict[str, float] | None = None) -> list[tuple[int, str]]:
    finder = Finder(known or {})
    finder.visit(ast.parse(text))
    return finder.found


@pytest.mark.slow
def test_no_test_fails_because_the_machine_is_busy() -> None:
    found = []
    for path in FILES:
        text = path.read_text()
        if not MENTIONED.search(text):
            continue
        finder = Finder(constants(path), has_virtual_time="run_virtual" in text)
        finder.visit(parse(path))
        found += [f"{path.relative_to(ROOT)}:{line} {what}" for line, what in finder.found]
    assert found == []


FOUND = {
    """
def test():
    started = time.monotonic()
    assert time.monotonic() - started < 2
""": "asserts less than 2 s",
    """
async def test():
    before, loop = loop.time(), 7
    took_s = loop.time() - before
    assert 0.1 < took_s < 4 * SHORT_S
""": "asserts less than 2 s",
    """
async def test():
    gaps = []
    gaps.append(time.perf_counter() - started)
    assert 0.3 >= max(gaps)
""": "asserts less than 0.3 s",
    "assert response.elapsed_s < SHORT_S": "asserts less than 0.5 s",
    "async def test(): await until(seen, 1.5, 'it')": "waits at most 1.5 s",
    "async def test(): await until(seen, timeout_s=SHORT_S)": "waits at most 0.5 s",
    "async def test(): await asyncio.wait_for(task, 5)": "waits at most 5 s",
    """
async def test():
    async with asyncio.timeout(10):
        await task
""": "waits at most 10 s",
}
EXEMPT = (
    "assert time.monotonic() - started < 5",
    "assert time.monotonic() - started > 0.3",
    "assert time.thread_time() - started < 0.3",
    "assert retry_s < 2",
    "async def test(): await until(seen)",
    """
async def test():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await task
""",
    """
async def test():
    try:
        await asyncio.wait_for(task, 0.3)
    except TimeoutError:
        pass
""",
    """
def test():
    async def main():
        started = loop.time()
        assert loop.time() - started < 2
    run_virtual(main())
""",
)


@pytest.mark.parametrize("text", FOUND)
def test_a_bar_and_a_short_wait_are_found(text: str) -> None:
    assert [what for _, what in find(text, {"SHORT_S": 0.5})] == [FOUND[text]]


@pytest.mark.parametrize("text", EXEMPT)
def test_what_a_busy_machine_does_not_change_is_not_found(text: str) -> None:
    assert find(text) == []
