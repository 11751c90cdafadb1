"""A Django project on psycopg: check, migrate, publish, `captured()` and `manage.py outbox`."""

import sys

import django
from django.conf import settings
from django.core.management import CommandError, call_command
from psycopg.conninfo import conninfo_to_dict

parts = conninfo_to_dict(sys.argv[1])
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "outbox.django"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts["dbname"],
            "USER": parts.get("user", ""),
            "PASSWORD": parts.get("password", ""),
            "HOST": parts.get("host", ""),
            "PORT": str(parts.get("port", "")),
        }
    },
    SECRET_KEY="secret",  # noqa: S106
    USE_TZ=True,
)
django.setup()

from django.db import connection, transaction  # noqa: E402

import outbox.testing  # noqa: E402
from outbox.django import publish  # noqa: E402

call_command("check", verbosity=0, fail_level="WARNING")
call_command("migrate", verbosity=0)
call_command("check", databases=["default"], verbosity=0, fail_level="WARNING")
with transaction.atomic(), outbox.testing.captured(connection) as events:
    publish("order.paid", {"order": 7}, key="order-7")
assert events.types == ["order.paid"]

from outbox.django.models import Event  # noqa: E402

assert Event.objects.get().type == "order.paid"
try:
    call_command("outbox", "status")
except CommandError as error:
    text, code = str(error), error.returncode
else:
    raise AssertionError("manage.py outbox needs no extra")
assert text.startswith("manage.py outbox needs the package "), text
assert text.endswith("run: pip install 'outbox-relay[relay]'"), text
assert code == 3
connection.close()
