"""Django projects that use the outbox: in this process, and in one of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
import django.conf
from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]

SETTINGS: dict[str, Any] = {
    "ALLOWED_HOSTS": ["*"],
    "INSTALLED_APPS": [
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django.contrib.sessions",
        "django.contrib.staticfiles",
        "outbox.django",
    ],
    "MIDDLEWARE": [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    "ROOT_URLCONF": "tests.django.urls",
    "SECRET_KEY": secrets.token_urlsafe(),
    "STATIC_URL": "static/",
    "TEMPLATES": [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
    "USE_TZ": True,
    "PASSWORD_HASHERS": ["django.contrib.auth.hashers.MD5PasswordHasher"],
}


def database_settings(dsn: str) -> dict[str, Any]:
    """An entry of DATABASES."""
    parts = conninfo_to_dict(dsn)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": str(parts.get("port", "")),
    }


@contextlib.contextmanager
def project(databases: Mapping[str, dict[str, Any]], **options: Any) -> Iterator[None]:
    """A project in this process, in which other tests may have configured Django already."""
    if not django.conf.settings.configured:
        django.conf.settings.configure()
        django.setup()
    # It cannot be overridden where it is empty.
    django.conf.settings.SECRET_KEY = SETTINGS["SECRET_KEY"]
    from django.db import connections
    from django.test.utils import override_settings

    before = dict(connections.databases)
    defaults = {**before["default"], "OPTIONS": {}}
    values = {name: value for name, value in SETTINGS.items() if name != "SECRET_KEY"}
    with override_settings(**values, **options):
        connections.databases.update(
            {alias: {**defaults, **given} for alias, given in databases.items()}
        )
        for alias in databases:
            with contextlib.suppress(AttributeError):
                del connections[alias]
        try:
            yield
        finally:
            for alias in databases:
                connections[alias].close()
                del connections[alias]
            connections.databases.clear()
            connections.databases.update(before)


class Site:
    """A project in a directory, with its own process for each command.

    Args:
        driver: `psycopg`, or `psycopg2`, as if the other one were not installed.
    """

    def __init__(
        self,
        directory: Path,
        databases: Mapping[str, dict[str, Any]],
        *,
        driver: str = "psycopg",
        **options: Any,
    ) -> None:
        self.directory = directory
        values = {**SETTINGS, "DATABASES": dict(databases), **options}
        (directory / "manage.py").write_text(
            textwrap.dedent(
                """\
                import os, sys
                os.environ.setdefault("DJANGO_SETTINGS_MODULE", "site_settings")
                from django.core.management import execute_from_command_line
                execute_from_command_line(sys.argv)
                """
            )
        )
        lines = [f"{name} = {value!r}" for name, value in values.items()]
        if driver == "psycopg2":
            lines.insert(0, 'import sys\nsys.modules["psycopg"] = None')
        (directory / "site_settings.py").write_text("\n".join(lines) + "\n")

    def manage(self, *arguments: str, code: int = 0, **env: str) -> str:
        """Run `manage.py`; returns what it printed."""
        ended = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert ended.returncode == code, ended.stdout
        return ended.stdout
