"""`outbox completion`: print the script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from outbox.cli.main import COMPLETE_VARIABLE, PROGRAM, cli
from outbox.cli.output import emit_document


@click.command(
    epilog="""\b
Examples:
  eval "$(outbox completion bash)"       in ~/.bashrc
  eval "$(outbox completion zsh)"        in ~/.zshrc, below compinit
  outbox completion fish >~/.config/fish/completions/outbox.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes commands and options in SHELL.

    It needs bash 4.4 or later. No database is read.
    """
    completion = get_completion_class(shell)
    assert completion is not None
    emit_document(completion(cli, {}, PROGRAM, COMPLETE_VARIABLE).source() + "\n")
