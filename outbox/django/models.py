"""Read-only models of events, endpoints and dead letters.

The tables belong to the migrations in `schema/`, so the models are unmanaged.  Publishing is
`outbox.django.publish`; endpoints and dead letters are changed with the commands, the HTTP API or
the relay's page.  Columns with secrets (an endpoint's headers and client certificate, the signing
secrets) have no field.
"""

from __future__ import annotations

from typing import Any, NoReturn

from django.db import models

from outbox.core.model.sql_names import quote_ident
from outbox.django.fields import EventTimeField, PayloadField, TextArrayField
from outbox.django.settings import APP_LABEL, read_databases, read_schema
from outbox.errors import UsageError


def model_options(table: str, name: str, plural: str) -> dict[str, Any]:
    """Options of a model, also in the state of migrations."""
    return {
        # Django does not quote a name that is quoted.
        "db_table": f"{quote_ident(read_schema())}.{quote_ident(table)}",
        "managed": False,
        "default_permissions": ("view",),
        "ordering": ("-pk",),
        "verbose_name": name,
        "verbose_name_plural": plural,
    }


EVENT = model_options("outbox", "event", "events")
ENDPOINT = {**model_options("endpoint", "endpoint", "endpoints"), "ordering": ("name",)}
DEAD_LETTER = model_options("dead_letter", "dead letter", "dead letters")


def _meta(options: dict[str, Any]) -> Any:
    return type("Meta", (), {**options, "app_label": APP_LABEL})


class ReadOnlyQuerySet(models.QuerySet):
    """A query set that changes nothing."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise read_only(self.model)

    create = bulk_create = get_or_create = update_or_create = _refuse
    update = bulk_update = delete = _refuse


_Manager: Any = models.Manager.from_queryset(ReadOnlyQuerySet)


class OutboxManager(_Manager):
    """Reads from a database that has the schema."""

    def get_queryset(self) -> Any:
        """Where the router's database has no outbox, the first of `OUTBOX_DATABASES`."""
        queryset, aliases = super().get_queryset(), read_databases()
        return queryset if self.db in aliases else queryset.using(aliases[0])


class ReadOnlyModel(models.Model):
    """A row that this application does not change."""

    objects = OutboxManager()

    Meta: Any = type("Meta", (), {"abstract": True})

    def save(self, *_: Any, **__: Any) -> NoReturn:
        """Refused.

        Raises:
            UsageError: always.
        """
        raise read_only(type(self))

    save_base = delete = save


def read_only(model: type[models.Model]) -> UsageError:
    """The error for a change of a row."""
    name = model._meta.verbose_name
    remedy = (
        "use outbox.django.publish"
        if name == "event"
        else "use manage.py outbox, the HTTP API or the relay's page"
    )
    return UsageError(f"{name}: the model is read-only; {remedy}")


class Event(ReadOnlyModel):
    """An event, as it was published."""

    id = models.BigIntegerField("outbox id", primary_key=True)
    event_id = models.UUIDField("event id")
    tenant = models.TextField(null=True)
    type = models.TextField()
    key = models.TextField(null=True)
    payload = PayloadField(null=True)
    body = models.BinaryField(null=True)
    content_type = models.TextField("content type of the body", null=True)
    headers = models.JSONField(null=True)
    expires_at = EventTimeField(null=True)
    created_at = EventTimeField("published at")
    erased_at = models.DateTimeField(null=True)

    Meta = _meta(EVENT)

    def __str__(self) -> str:
        return f"{self.type} {self.event_id}"


class Endpoint(ReadOnlyModel):
    """A destination and its configuration, without secrets."""

    id = models.UUIDField(primary_key=True)
    name = models.TextField()
    state = models.TextField()
    state_at = models.DateTimeField("state since")
    state_by = models.TextField("state set by", null=True)
    state_comment = models.TextField("comment", null=True)
    types = TextArrayField()
    tenant = models.TextField(null=True)
    all_tenants = models.BooleanField()
    filter = models.TextField(null=True)
    url = models.TextField("URL")
    method = models.TextField()
    format = models.TextField()
    lanes = models.IntegerField()
    in_flight_max = models.IntegerField("maximum in flight", null=True)
    rate_per_s = models.FloatField("requests per second", null=True)
    batch_max = models.IntegerField("maximum batch", null=True)
    timeout_s = models.FloatField("time-out (s)")
    retry = models.JSONField("retry policy")
    on_dead_letter = models.TextField()
    on_missing = models.TextField()
    probes = models.BooleanField()
    on_forgotten = models.TextField()
    created_at = models.DateTimeField()

    Meta = _meta(ENDPOINT)

    def __str__(self) -> str:
        return str(self.name)


class DeadLetter(ReadOnlyModel):
    """A delivery, or a range of them, whose retries ended, with a copy of the event."""

    id = models.BigIntegerField(primary_key=True)
    endpoint = models.ForeignKey(Endpoint, models.DO_NOTHING, related_name="+", db_constraint=False)
    lane_id = models.BigIntegerField("lane")
    seq = models.BigIntegerField("sequence number")
    to_seq = models.BigIntegerField("last sequence number")
    outbox_id = models.BigIntegerField("outbox id", null=True)
    event_id = models.UUIDField("event id", null=True)
    tenant = models.TextField(null=True)
    type = models.TextField(null=True)
    key = models.TextField(null=True)
    payload = PayloadField(null=True)
    body = models.BinaryField(null=True)
    content_type = models.TextField("content type of the body", null=True)
    headers = models.JSONField(null=True)
    published_at = EventTimeField(null=True)
    expires_at = EventTimeField(null=True)
    reason = models.TextField()
    attempts = models.IntegerField()
    last_response = models.JSONField(null=True)
    at = models.DateTimeField("dead-lettered at")
    state = models.TextField()
    erased_at = models.DateTimeField(null=True)

    Meta = _meta(DEAD_LETTER)

    def __str__(self) -> str:
        return f"dead letter {self.pk}"
