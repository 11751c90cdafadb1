"""Client libraries of brokers: each is an extra of this package, imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from outbox.extras import install_hint
from outbox.plugins import PluginUnusable
from outbox.version import __version__


def load_class(broker: str, client: str, module: str, class_name: str) -> Any:
    """Load a class that needs a client library.

    Args:
        broker: the broker's name, which its folder here and the extra with its client library have.
        client: module of the client library.
        module: its name in the folder.

    Raises:
        PluginUnusable: the client library is not installed; one line with the command.
    """
    try:
        # A folder of that name, such as one with a server's settings, is a package without a file.
        is_there = getattr(import_module(client), "__file__", None) is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise PluginUnusable(
            f"url: the client library for {broker} is missing; "
            + install_hint(f"outbox-brokers[{broker}]=={__version__}", broker)
        )
    return getattr(import_module(f"{__package__}.{broker}.{module}"), class_name)
