"""Applies schema/0002_relay.sql."""

from __future__ import annotations

from django.db import migrations, models

from outbox.django.models import DEAD_LETTER, ENDPOINT
from outbox.django.operations import ApplyFile
from outbox.django.settings import APP_LABEL


class Migration(migrations.Migration):
    """Not atomic: the file is applied in a transaction of its own."""

    atomic = False
    dependencies = [(APP_LABEL, "0001_outbox")]  # noqa: RUF012
    operations = [  # noqa: RUF012
        ApplyFile(2),
        migrations.CreateModel(
            "Endpoint", [("id", models.UUIDField(primary_key=True))], options={**ENDPOINT}
        ),
        migrations.CreateModel(
            "DeadLetter",
            [("id", models.BigIntegerField(primary_key=True))],
            options={**DEAD_LETTER},
        ),
    ]
