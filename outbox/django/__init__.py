"""Django application: `INSTALLED_APPS += ["outbox.django"]`.

    from outbox.django import publish

    with transaction.atomic():
        order.save()
        publish("order.paid", {"order": order.pk}, key=f"order-{order.pk}")

It has the migrations of the schema, system checks, read-only models with an admin, and the command
`manage.py outbox`.  Its settings are in `outbox.django.settings`.
"""

from __future__ import annotations

from outbox.django.publishing import publish, publish_many, reset, snapshot
from outbox.producers.event import Event

__all__ = ["Event", "publish", "publish_many", "reset", "snapshot"]
