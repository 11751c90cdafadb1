"""Settings of the Django project that this application reads, and their defaults.

    OUTBOX_SCHEMA = "relay"             schema of the outbox, the same in each database
    OUTBOX_DATABASES = ["default"]      aliases of the databases that have it; the admin shows
                                        the first one unless another is selected
    OUTBOX_PAGE_URL = None              URL of a relay's page, which the admin links to

The relay does not read them: it has settings of its own, see `outbox.config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from outbox.core.model.schema_name import SCHEMA
from outbox.core.model.sql_names import schema_name
from outbox.errors import UsageError

if TYPE_CHECKING:
    from uuid import UUID

APP_LABEL = "outbox_relay"
"""The application's label.  It is not `outbox`: an application of the project may have that
name."""


def read_schema() -> str:
    """The schema of the outbox.

    Raises:
        ImproperlyConfigured: the name is not possible.
    """
    schema = getattr(settings, "OUTBOX_SCHEMA", SCHEMA)
    if not isinstance(schema, str):
        raise ImproperlyConfigured(f"OUTBOX_SCHEMA: must be a name, not {schema!r}")
    try:
        schema_name(schema)
    except UsageError as error:
        raise ImproperlyConfigured(f"OUTBOX_SCHEMA: {error}") from None
    if "%" in schema:
        raise ImproperlyConfigured('OUTBOX_SCHEMA: Django does not support "%" in a schema\'s name')
    return schema


def read_databases() -> tuple[str, ...]:
    """Aliases of the databases that have the schema; the first one is the default of the admin.

    Raises:
        ImproperlyConfigured: it is not a list of aliases of DATABASES.
    """
    aliases = getattr(settings, "OUTBOX_DATABASES", ("default",))
    if isinstance(aliases, str) or not aliases:
        raise ImproperlyConfigured(f"OUTBOX_DATABASES: must be a list of aliases, not {aliases!r}")
    # Imported here: DATABASES is evaluated on first use.
    from django.db import connections

    for alias in aliases:
        if alias not in connections.settings:
            raise ImproperlyConfigured(
                f'OUTBOX_DATABASES: DATABASES has no "{alias}"; '
                f"it has: {', '.join(connections.settings)}"
            )
    return tuple(aliases)


def read_page_url() -> str | None:
    """URL of a relay's page, without a slash at its end; None: not set.

    Raises:
        ImproperlyConfigured: it is not an http(s) URL.
    """
    url = getattr(settings, "OUTBOX_PAGE_URL", None)
    if not url:
        return None
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ImproperlyConfigured(
            f"OUTBOX_PAGE_URL: must be the URL of a relay's page, such as "
            f"https://outbox.example.com, not {url!r}"
        )
    return str(url).rstrip("/")


def page_link(place: str, item: str | int | UUID) -> str | None:
    """The page's URL for an item: `events`, `endpoints` or `dead-letters`; None: there is none."""
    url = read_page_url()
    return None if url is None else f"{url}/#/{place}/{quote(str(item), safe='')}"


def manage_migrate_command(alias: str) -> str:
    """The shell command that creates the schema in a database, or upgrades it."""
    return f"manage.py migrate {APP_LABEL} --database {alias}"
