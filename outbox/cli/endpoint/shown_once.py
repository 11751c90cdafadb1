"""A signing secret, which the command that sets it shows once, or its public key."""

from __future__ import annotations

from outbox.cli.output import echo
from outbox.core.messages.ed25519 import PUBLIC_PREFIX


def secret_row(secret: str | None) -> tuple[str, str]:
    """What a row of the output is called, and what it has.

    Args:
        secret: a new secret, or the public key of one; None: it was given, and is not shown.
    """
    is_public = secret is not None and secret.startswith(PUBLIC_PREFIX)
    return "public key" if is_public else "secret", secret or "the given one"


def note_shown_once(secret: str | None) -> None:
    """Tell the user to save a new secret; a public key is shown again, and a given one is known."""
    if secret is not None and not secret.startswith(PUBLIC_PREFIX):
        echo("Save the secret now; it is not shown again.", err=True)
