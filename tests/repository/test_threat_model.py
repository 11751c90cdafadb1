"""Each attack of the threat model names tests that show its defence, and they exist."""

from __future__ import annotations

import ast
import re

from tests.support.checkout import ROOT

PAGE = ROOT / "docs" / "concepts" / "threat-model.md"
TEST = re.compile(r"`([\w/.]+\.py)::(\w+)`")


def test_each_attack_has_tests_that_exist() -> None:
    attacks = PAGE.read_text().partition("## Attacks")[2]
    rows = [line for line in attacks.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    missing = []
    for row in rows:
        named = TEST.findall(row.split("|")[3])
        assert named, row
        for path, name in named:
            nodes = ast.walk(ast.parse((ROOT / path).read_text()))
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            if name not in {each.name for each in nodes if isinstance(each, functions)}:
                missing.append(f"{path}::{name}")
    assert missing == []
