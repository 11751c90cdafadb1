"""The command group `outbox endpoint`."""

from __future__ import annotations

import click

from outbox.cli.group import Group
from outbox.cli.main import CommandEntry
from outbox.errors import MissingExtra
from outbox.leaves import ADOPT

IMPORT = CommandEntry(
    "import", "Add the endpoints of Svix, Convoy, Outpost or a table.", "", ADOPT, "import_peers"
)


class EndpointGroup(Group):
    """The commands of `outbox.cli.endpoint`, and one of a leaf."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), IMPORT.name])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != IMPORT.name:
            return super().get_command(ctx, cmd_name)
        try:
            return IMPORT.load()
        except MissingExtra as error:
            return _missing(error)


def _missing(error: MissingExtra) -> click.Command:
    """A command whose leaf is not installed: it is listed, and says so when it is called."""

    def fail(**_: object) -> None:
        raise error

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(
        IMPORT.name, callback=fail, short_help=IMPORT.help, context_settings=anything
    )


@click.group("endpoint", cls=EndpointGroup)
def command() -> None:
    """Add, change, pause, test and remove endpoints, the destinations of events."""
