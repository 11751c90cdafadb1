"""Client libraries of brokers: each is an extra of this package, imported when it is used."""

from __future__ import annotations

from importlib import import_module

from outbox.plugins import PluginUnusable
from outbox.version import __version__


def require_client(module: str, extra: str) -> None:
    """Require that a client library is installed.

    Raises:
        PluginUnusable: it is not; one line with the command that installs it.
    """
    try:
        # A folder of that name, such as one with a server's settings, is a package without a file.
        is_there = getattr(import_module(module), "__file__", None) is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise PluginUnusable(
            f"url: the client library for {extra} is missing; run: pip install "
            f"'outbox-brokers[{extra}]=={__version__}'"
        )
