"""Applies schema/0025_send_again.sql."""

from __future__ import annotations

from django.db import migrations

from outbox.django.operations import ApplyFile
from outbox.django.settings import APP_LABEL


class Migration(migrations.Migration):
    """Not atomic: the file is applied in a transaction of its own."""

    atomic = False
    dependencies = [(APP_LABEL, "0024_runs")]  # noqa: RUF012
    operations = [ApplyFile(25)]  # noqa: RUF012
