"""Command groups: an unknown command is refused with the nearest name."""

from __future__ import annotations

import difflib

import click


def suggest(group: click.Group, ctx: click.Context, args: list[str]) -> None:
    """Reject an unknown command, and suggest the nearest name.

    Raises:
        click.UsageError: the command does not exist.
    """
    names = group.list_commands(ctx)
    if ctx.resilient_parsing or args[0] in names or args[0].startswith("-"):
        return
    near = difflib.get_close_matches(args[0], names, 1)
    hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(names)}"
    raise click.UsageError(f'there is no command "{args[0]}"; {hint}', ctx)


class Group(click.Group):
    """A command group whose commands are already imported."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        suggest(self, ctx, args)
        return super().resolve_command(ctx, args)
