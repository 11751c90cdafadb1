"""Applies schema/0001_outbox.sql."""

from __future__ import annotations

from django.db import migrations, models

from outbox.django.models import EVENT
from outbox.django.operations import ApplyFile


class Migration(migrations.Migration):
    """Not atomic: the file is applied in a transaction of its own."""

    atomic = False
    dependencies: list[tuple[str, str]] = []  # noqa: RUF012
    operations = [  # noqa: RUF012
        ApplyFile(1),
        # Django does not compare the fields of unmanaged models.
        migrations.CreateModel(
            "Event", [("id", models.BigIntegerField(primary_key=True))], options={**EVENT}
        ),
    ]
