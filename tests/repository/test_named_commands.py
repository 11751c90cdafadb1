"""Messages and documentation strings name commands that exist."""

from __future__ import annotations

import ast
import re

import click

from outbox.cli.main import COMMANDS, cli
from tests.repository.sources import PROGRAM, nodes


def test_messages_name_commands_that_exist() -> None:
    root = click.Context(cli)
    groups = {e.name: cli.get_command(root, e.name) for e in COMMANDS}
    groups = {name: group for name, group in groups.items() if isinstance(group, click.Group)}
    named = re.compile(f"outbox ({'|'.join(groups)}) ([a-z][a-z-]*)")
    found = {
        match.groups()
        for path in PROGRAM
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for match in named.finditer(node.value)
    }
    assert len(found) > 20
    assert [each for each in found if groups[each[0]].get_command(root, each[1]) is None] == []
