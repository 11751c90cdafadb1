"""The settings of the API's process, and how a relay hands them over to the one that it starts.

They go through a pipe: arguments and variables of a process can be read by others of its user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from outbox.config import Process, Settings, field_names, read_files, readers_of, variable_of
from outbox.setting_sources import FILE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_PARENT = ("api_dsn", "health", "admin", "receivers")
"""Settings of the API that its parent has applied when it hands the others over."""


def for_api(settings: Settings) -> Settings:
    """The settings of the API's process, which connects by `api_dsn` if that is set."""
    if settings.api_dsn is None:
        return settings
    files, source = dict(settings.secret_files), variable_of("api_dsn")
    files.pop("dsn", None)
    if (own := files.pop("api_dsn", None)) is not None:
        files["dsn"], source = own, source + FILE_SUFFIX
    found = {"dsn": settings.api_dsn, "dsn_source": source, "secret_files": files}
    return settings.model_copy(update=found)


def hand_over(settings: Settings) -> dict[str, Any]:
    """What the process of the API, as a child of a relay, is told of the settings, as JSON.

    Of a secret that has a file, that is the name of the file.
    """
    given = for_api(settings)
    names = [name for name in api_fields() if name not in _OF_PARENT]
    files = {name: path for name, path in given.secret_files.items() if name in names}
    values = {name: _plain(getattr(given, name)) for name in names if name not in files}
    return values | {"dsn_source": given.dsn_source, "secret_files": files}


def take_over(values: Mapping[str, Any]) -> Settings:
    """The settings that `hand_over` gave.

    Raises:
        UsageError: the file of a secret is unreadable or has an invalid value.
    """
    return read_files(values, values["secret_files"])


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return [str(each) for each in value] if isinstance(value, tuple) else value


def api_fields() -> list[str]:
    """The settings that the API's process reads."""
    fields = Settings.model_fields
    return [name for name in field_names().values() if Process.API in readers_of(fields[name])]
