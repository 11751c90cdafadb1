"""Applies schema/0028_customers.sql."""

from __future__ import annotations

from django.db import migrations

from outbox.django.operations import ApplyFile
from outbox.django.settings import APP_LABEL


class Migration(migrations.Migration):
    """Not atomic: the file is applied in a transaction of its own."""

    atomic = False
    dependencies = [(APP_LABEL, "0027_positions")]  # noqa: RUF012
    operations = [ApplyFile(28)]  # noqa: RUF012
