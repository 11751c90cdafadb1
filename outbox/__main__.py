"""The command `outbox`, also as `python -m outbox`; without `[relay]` it says what to install."""

from __future__ import annotations

import sys

from outbox.errors import MissingExtra
from outbox.extras import RELAY, needs_extra


def main() -> None:
    """Entry point of the console script."""
    try:
        with needs_extra(RELAY, "the command line"):
            from outbox.cli.main import main as run
    except MissingExtra as error:
        print(f"outbox: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    run()


if __name__ == "__main__":
    main()
