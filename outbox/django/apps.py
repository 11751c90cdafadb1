"""Configuration of the Django application."""

from __future__ import annotations

from django.apps import AppConfig

from outbox.django.settings import APP_LABEL


class OutboxConfig(AppConfig):
    """The outbox, as an application of a Django project."""

    name = "outbox.django"
    label = APP_LABEL
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks."""
        from outbox.django import checks

        checks.register_all()
