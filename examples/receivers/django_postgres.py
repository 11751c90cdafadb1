"""Receiver that applies transfers to accounts: Django, PostgreSQL.

OUTBOX_SECRET=whsec_… DATABASE_URL=postgresql://… PORT=9000 python django_postgres.py

In production: gunicorn --threads 8 django_postgres
"""

import os

import django
from django.conf import settings
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from django.db import connection, models
from django.http import JsonResponse
from django.urls import path
from psycopg.conninfo import conninfo_to_dict

from outbox.receiver import Receiver
from outbox.receiver.adapters.wsgi import Middleware

DATABASE = conninfo_to_dict(os.environ["DATABASE_URL"])
settings.configure(
    ALLOWED_HOSTS=["127.0.0.1"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": DATABASE.pop("dbname"),
            "OPTIONS": DATABASE,
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("SECRET_KEY", "only for this example"),
    WSGI_APPLICATION=f"{__name__}.application",
)
django.setup()


class Account(models.Model):
    cents = models.BigIntegerField(default=0)

    class Meta:
        app_label = "shop"


class Processed(models.Model):
    event = models.TextField()

    class Meta:
        app_label = "shop"


# The alias of the connection names the database: each thread uses its own connection.
receiver = Receiver(os.environ["OUTBOX_SECRET"], connection)


@receiver.on("account.moved")
def apply_transfer(delivery, connection):
    # In the transaction of the delivery, like everything on the same alias.
    account, _ = Account.objects.get_or_create(id=delivery.data["account"])
    Account.objects.filter(id=account.id).update(cents=models.F("cents") + delivery.data["cents"])


@receiver.on("**")
def record_processed(delivery, connection):
    Processed.objects.create(event=delivery.event_id)


def processed(request):
    events = Processed.objects.order_by("id").values_list("event", flat=True)
    return JsonResponse(list(events), safe=False)


urlpatterns = [path("processed", processed)]

with connection.schema_editor() as editor:
    for model in (Account, Processed):
        # A project has migrations instead.
        if model._meta.db_table not in connection.introspection.table_names():
            editor.create_model(model)

application = Middleware(get_wsgi_application(), receiver, "/hooks")

if __name__ == "__main__":
    address = f"127.0.0.1:{os.environ.get('PORT', '9000')}"
    call_command("runserver", address, use_reloader=False)
