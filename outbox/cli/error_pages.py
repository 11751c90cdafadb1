"""Pages of the documents that explain errors; `run` prints the address of one after its error."""

from __future__ import annotations

DOCUMENTS_URL = "https://github.com/outbox-relay/outbox/blob/main/docs/"

PAGES = {
    "AddressRefused": "howto/allow-a-private-network.md",
    "AlteredSecret": "howto/encrypt-secrets.md#altered-secrets",
    "CursorBroken": "howto/back-up-and-restore.md",
    "InsufficientPrivilegeError": "howto/grant-database-roles.md",
    "LacksPrivileges": "howto/grant-database-roles.md",
    "MissingExtra": "howto/install.md",
    "PluginUnusable": "howto/deliver-to-a-broker.md#set-it-up",
    "QuotaExceeded": "howto/limit-tenants.md",
    "SchemaMissing": "howto/upgrade.md",
    "SchemaTooNew": "howto/upgrade.md#roll-back",
    "UnreadableSecret": "howto/encrypt-secrets.md",
}
"""The page by the name of the error's class or, without one, of its cause's."""


def find_page(error: BaseException | None) -> str | None:
    """The address of the page that explains an error; None: there is no such page."""
    while error is not None:
        for kind in type(error).__mro__:
            if kind.__name__ in PAGES:
                return DOCUMENTS_URL + PAGES[kind.__name__]
        error = error.__cause__
    return None
