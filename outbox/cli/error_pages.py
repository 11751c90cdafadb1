"""Pages of the documents that explain errors; `run` prints the address of one after its error."""

from __future__ import annotations

DOCUMENTS_URL = "https://github.com/outbox-relay/outbox/blob/main/docs/"

PAGES = {
    "howto/allow-a-private-network.md": ["AddressRefused"],
    "howto/back-up-and-restore.md": ["CursorBroken"],
    "howto/deliver-to-a-broker.md#set-it-up": ["PluginUnusable"],
    "howto/encrypt-secrets.md": ["UnreadableSecret"],
    "howto/encrypt-secrets.md#altered-secrets": ["AlteredSecret"],
    "howto/grant-database-roles.md": ["InsufficientPrivilegeError", "LacksPrivileges"],
    "howto/install.md": ["ImportError", "MissingExtra"],
    "howto/limit-tenants.md": ["QuotaExceeded"],
    "howto/upgrade.md": ["SchemaMissing"],
    "howto/upgrade.md#roll-back": ["SchemaTooNew"],
}
"""The errors that each page explains, by the name of their class: none is imported."""
_PAGE_OF = {name: page for page, names in PAGES.items() for name in names}


def find_page(error: BaseException | None) -> str | None:
    """The address of the page that explains an error or its cause; None: there is no such page."""
    while error is not None:
        for kind in type(error).__mro__:
            if kind.__name__ in _PAGE_OF:
                return DOCUMENTS_URL + _PAGE_OF[kind.__name__]
        error = error.__cause__
    return None
