"""The admin shows events, endpoints and dead letters; it changes nothing.

An operator acts on the relay's page, to which it links.  Signing secrets, header values of
endpoints and the contents of receivers' responses are not shown.

Lists of events and dead letters stay fast on large tables.  Most columns have no index, because
each would slow down every producer.  So a list shows, counts and filters the newest rows only, and
a search finds rows of any age by the columns that have one.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db import connections, transaction
from django.db.models import TextField
from django.db.models.functions import Cast, Length
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.timezone import template_localtime
from django.utils.translation import get_language

from outbox.core.model.stored_response import outcome_fields
from outbox.core.model.text import count, indent_json, safe_lines
from outbox.django.models import DeadLetter, Endpoint, Event
from outbox.django.settings import APP_LABEL, page_link, read_databases

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NEWEST = 20_000
"""Number of rows that a list shows, counts and filters."""
FOUND_MAX = 1_000
"""Maximum number of rows that a search finds."""
DIGITS_MAX = 18
"""Digits of the longest number that is searched: longer ones are not all in the range of bigint."""
TIME_LOOKUPS = ("gte", "lt", "isnull")
"""Those of a filter by time."""
DATABASE = "database"
"""Query parameter: alias of the database."""

# Keys and event ids are in a bloom filter (BRIN), which only a bitmap scan uses.  It is used
# instead of a walk through the table or the primary key, whatever the estimates are.
PLAN_BY_BITMAP = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_indexscan', 'off', true)
"""


def selected_database(request: Any) -> str:
    """Alias of the database that a request selects; by default the first one."""
    aliases = read_databases()
    given = request.GET.get(DATABASE)
    return given if given in aliases else aliases[0]


def with_database(url: str, alias: str) -> str:
    """A URL of the admin that selects the same database."""
    return url if alias == read_databases()[0] else f"{url}?{urlencode({DATABASE: alias})}"


class DatabaseFilter(admin.SimpleListFilter):
    """Selects the database, where several have an outbox."""

    title = "database"
    parameter_name = DATABASE

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        """The aliases; without a choice there is no filter."""
        aliases = read_databases()
        return [(alias, alias) for alias in aliases] if len(aliases) > 1 else []

    def choices(self, changelist: Any) -> Any:
        """The aliases, without "All"."""
        selected = self.value() or read_databases()[0]
        for alias, title in self.lookup_choices:
            query = changelist.get_query_string({DATABASE: alias})
            yield {"selected": alias == selected, "query_string": query, "display": title}

    def queryset(self, request: Any, queryset: Any) -> Any:
        """The rows, which `get_queryset` has read from the selected database."""
        return queryset


def newest_rows(queryset: Any) -> Any:
    """The rows of the newest `NEWEST` ids."""
    ids = queryset.order_by("-pk").values_list("pk", flat=True)
    older = next(iter(ids[NEWEST : NEWEST + 1]), None)
    return queryset if older is None else queryset.filter(pk__gt=older)


def value_filter(column: str, name: str) -> type[admin.SimpleListFilter]:
    """A filter with the values that a column has in the newest rows."""

    class ValueFilter(admin.SimpleListFilter):
        title = name
        parameter_name = column.replace("__", "_")

        def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
            rows = newest_rows(model_admin.get_queryset(request))
            values = rows.order_by(column).values_list(column, flat=True).distinct()
            return [(value, value) for value in values if value is not None]

        def queryset(self, request: Any, queryset: Any) -> Any:
            if self.value() is None:
                return None
            listed = {value for value, _ in self.lookup_choices}
            return (
                queryset.filter(**{column: self.value()})
                if self.value() in listed
                else queryset.none()
            )

    return ValueFilter


class OutboxChangeList(ChangeList):
    """A list without large columns, of one database."""

    def get_queryset(self, request: Any, exclude_parameters: Any = None) -> Any:
        """The newest rows, or those that a search finds."""
        if not self.query:
            self.root_queryset: Any = self.model_admin.list_rows(self.root_queryset)
        queryset = super().get_queryset(request, exclude_parameters)
        return queryset.defer(*self.model_admin.large_columns)

    def url_for_result(self, result: Any) -> str:
        """The address of a row in its database."""
        return with_database(super().url_for_result(result), result._state.db)


def escape_page(html: str) -> str:
    """Escape characters that hide or reorder others, as the commands do.

    Words of Persian, Khmer and other languages have joiners and marks, U+200B to U+200F, which stay
    on pages in another language than English.
    """
    if (get_language() or "en").startswith("en"):
        return safe_lines(html)
    return re.sub("[^\u200b-\u200f]+", lambda found: safe_lines(found[0]), html)


def escape_hidden(response: Any) -> Any:
    """Escape a page when it is rendered; see `escape_page`."""

    def escape(rendered: Any) -> None:
        text = rendered.content.decode(rendered.charset)
        rendered.content = escape_page(text).encode(rendered.charset)

    if isinstance(response, TemplateResponse):
        response.add_post_render_callback(escape)
    return response


class ReadOnlyAdmin(admin.ModelAdmin):
    """Shows rows of one of the databases."""

    actions = None
    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    large_columns: Sequence[str] = ()
    page_place = ""
    """Place of an item on the relay's page."""

    class Media:
        css = {"all": ("outbox_relay/admin.css",)}  # noqa: RUF012

    def has_add_permission(self, request: Any) -> bool:
        """Never."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Never."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Never."""
        return False

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Only those of the filters: any other one would reveal a hidden column bit by bit."""
        times = (each[0] for each in self.list_filter if isinstance(each, tuple))
        # Django asks for the parameters of other filters, too, which are no lookups.
        names = (each.parameter_name for each in self.list_filter if not isinstance(each, tuple))
        ranges = (f"{time}__{end}" for time in times for end in TIME_LOOKUPS)
        return lookup in (*names, *ranges)

    def get_queryset(self, request: Any) -> Any:
        """Rows of the selected database."""
        return super().get_queryset(request).using(selected_database(request))

    def get_changelist(self, request: Any, **_: Any) -> type[ChangeList]:
        """The list."""
        return OutboxChangeList

    def list_rows(self, queryset: Any) -> Any:
        """The rows of a list without a search."""
        return queryset

    def changelist_view(self, request: Any, *args: Any, **options: Any) -> Any:
        """The list."""
        return escape_hidden(super().changelist_view(request, *args, **options))

    def changeform_view(self, request: Any, *args: Any, **options: Any) -> Any:
        """The details."""
        return escape_hidden(super().changeform_view(request, *args, **options))

    def history_view(self, request: Any, *args: Any, **options: Any) -> Any:
        """Changes by users of the admin: none."""
        return escape_hidden(super().history_view(request, *args, **options))

    def page_item(self, row: Any) -> str:
        """What identifies a row on the relay's page."""
        return str(row.pk)

    def render_change_form(self, request: Any, context: Any, *args: Any, **options: Any) -> Any:
        """The details, with a link to the relay's page."""
        if self.page_place and (row := context.get("original")) is not None:
            context["page_link"] = page_link(self.page_place, self.page_item(row))
        return super().render_change_form(request, context, *args, **options)


class LogAdmin(ReadOnlyAdmin):
    """A large table, whose newest rows are listed."""

    search_fields = ("pk",)  # The search box is there; `get_search_results` searches.

    def list_rows(self, queryset: Any) -> Any:
        """The newest rows."""
        return newest_rows(queryset)

    def search(self, text: str) -> list[dict[str, Any]]:
        """Conditions on columns with an index; one of them has to hold."""
        raise NotImplementedError

    def get_search_results(self, request: Any, queryset: Any, text: str) -> tuple[Any, bool]:
        """The rows of any age that a text identifies."""
        text = text.strip()
        if not text:
            return queryset, False
        alias = queryset.db
        ids: set[int] = set()
        with transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute(PLAN_BY_BITMAP)
            for conditions in self.search(text):
                rows = self.model.objects.using(alias).filter(**conditions)
                ids.update(rows.values_list("pk", flat=True)[:FOUND_MAX])
        return queryset.filter(pk__in=ids), False


def readable_json(value: Any) -> str:
    """JSON on several lines."""
    return "-" if value is None else readable_json_text(json.dumps(value, ensure_ascii=False))


def readable_json_text(text: str) -> str:
    """JSON text on several lines."""
    return str(format_html('<pre class="outbox-json">{}</pre>', indent_json(text)))


def time_column(column: str, name: str) -> Callable[[Any], str]:
    """A column with seconds, which Django's own format lacks."""

    @admin.display(description=name)
    def show(row: Any) -> str:
        value = getattr(row, column)
        return "-" if value is None else f"{template_localtime(value):%Y-%m-%d %H:%M:%S}"

    show.__name__ = column
    shown: Callable[[Any], str] = show
    return shown


PUBLISHED_AT = time_column("created_at", "published at")
COPY_PUBLISHED_AT = time_column("published_at", "published at")
EXPIRES_AT = time_column("expires_at", "expires at")
DEAD_LETTERED_AT = time_column("at", "dead-lettered at")
STATE_AT = time_column("state_at", "state since")
CREATED_AT = time_column("created_at", "created at")


class _CopyOfEvent(LogAdmin):
    """What events and dead letters have in common."""

    def get_queryset(self, request: Any) -> Any:
        """Rows with the size of a body in place of the body."""
        queryset = super().get_queryset(request)
        return queryset.defer("body", "payload").annotate(body_bytes=Length("body"))

    @admin.display(description="payload")
    def readable_payload(self, row: Any) -> str:
        """The payload, or the size of one that is not JSON, unless it was erased."""
        if row.erased_at is not None:
            return f"erased at {template_localtime(row.erased_at):%Y-%m-%d %H:%M:%S}"
        if row.content_type is not None:
            return f"{count(row.body_bytes, 'byte')} of {row.content_type}"
        # As it is stored: the parser rounds numbers with a fraction.
        query = type(row).objects.using(row._state.db).filter(pk=row.pk)
        text = query.values_list(Cast("payload", TextField()), flat=True).first()
        return "-" if text is None else readable_json_text(text)

    @admin.display(description="headers")
    def readable_headers(self, row: Any) -> str:
        """The event's own headers."""
        return readable_json(row.headers)


@admin.register(Event)
class EventAdmin(_CopyOfEvent):
    """Events."""

    list_display = (PUBLISHED_AT, "type", "key", "event_id")
    list_filter = (
        DatabaseFilter,
        value_filter("type", "type"),
        value_filter("tenant", "tenant"),
        ("created_at", admin.DateFieldListFilter),
    )
    search_help_text = (
        f"The list has the newest {NEWEST:,} events. A search finds older ones, too: by event id, "
        "outbox id or key."
    )
    large_columns = ("payload", "body", "headers")
    page_place = "events"
    fields = (
        "event_id", "id", "type", "key", "tenant", PUBLISHED_AT, EXPIRES_AT,
        "readable_payload", "readable_headers",
    )  # fmt: skip
    readonly_fields = fields

    def search(self, text: str) -> list[dict[str, Any]]:
        """Conditions for the key, event id or outbox id."""
        return [{"key": text}, *_ids(text, "event_id", "id")]

    def page_item(self, row: Any) -> str:
        """The event id."""
        return str(row.event_id)


@admin.register(DeadLetter)
class DeadLetterAdmin(_CopyOfEvent):
    """Dead letters."""

    list_display = ("id", DEAD_LETTERED_AT, "endpoint", "type", "key", "reason", "state")
    list_select_related = ("endpoint",)
    list_filter = (
        DatabaseFilter,
        value_filter("endpoint__name", "endpoint"),
        value_filter("state", "state"),
        value_filter("reason", "reason"),
        value_filter("type", "type"),
        ("at", admin.DateFieldListFilter),
    )
    search_help_text = (
        f"The list has the newest {NEWEST:,} dead letters. A search finds older ones, too: by "
        "event id, outbox id or the id of a dead letter."
    )
    large_columns = ("payload", "body", "headers", "last_response")
    page_place = "dead-letters"
    fields = (
        "id", "endpoint_link", "sequence", "reason", "state", "attempts", "response",
        DEAD_LETTERED_AT, "event_link", "type", "key", "tenant", COPY_PUBLISHED_AT, EXPIRES_AT,
        "readable_payload", "readable_headers",
    )  # fmt: skip
    readonly_fields = fields

    def search(self, text: str) -> list[dict[str, Any]]:
        """Conditions for the event id, outbox id or id."""
        return _ids(text, "event_id", "outbox_id", "id")

    @admin.display(description="sequence")
    def sequence(self, row: Any) -> str:
        """The sequence number in the lane, or a range of them."""
        return str(row.seq) if row.seq == row.to_seq else f"{row.seq} to {row.to_seq}"

    @admin.display(description="last response")
    def response(self, row: Any) -> str:
        """Status or failure; what the receiver sent is on the relay's page."""
        if row.last_response is None:
            return "never sent"
        outcome = outcome_fields(row.last_response)
        named = {"status": "status {}", "failure": "{}", "elapsed_ms": "after {:g} ms"}
        return ", ".join(
            text.format(outcome[name]) for name, text in named.items() if name in outcome
        )

    @admin.display(description="endpoint")
    def endpoint_link(self, row: Any) -> str:
        """The endpoint."""
        return _link("endpoint", row.endpoint_id, row._state.db, row.endpoint)

    @admin.display(description="event")
    def event_link(self, row: Any) -> str:
        """The event, which retention may have deleted."""
        if row.outbox_id is None:
            return "several deliveries, which were never sent"
        return _link("event", row.outbox_id, row._state.db, row.event_id)


@admin.register(Endpoint)
class EndpointAdmin(ReadOnlyAdmin):
    """Endpoints."""

    list_display = ("name", "state", "subscription", "tenants", "url", "lanes")
    list_filter = (DatabaseFilter, value_filter("state", "state"))
    search_fields = ("name", "url")
    search_help_text = "By a part of the name or of the URL."
    page_place = "endpoints"
    fields = (
        "name", "id", "url", "method", "format", "state", STATE_AT, "state_by", "state_comment",
        "subscription", "tenants", "filter", "lanes", "in_flight_max", "rate_per_s", "batch_max",
        "timeout_s", "on_dead_letter", "readable_retry", CREATED_AT,
    )  # fmt: skip
    readonly_fields = fields

    def page_item(self, row: Any) -> str:
        """The name."""
        return str(row.name)

    @admin.display(description="types")
    def subscription(self, row: Any) -> str:
        """Patterns of the event types that it receives."""
        return ", ".join(row.types)

    @admin.display(description="tenant")
    def tenants(self, row: Any) -> str:
        """Tenants of the events that it receives."""
        return "all" if row.all_tenants else row.tenant or "-"

    @admin.display(description="retry policy")
    def readable_retry(self, row: Any) -> str:
        """The retry policy."""
        return readable_json(row.retry)


def _link(model: str, pk: object, alias: str, text: object) -> str:
    url = reverse(f"admin:{APP_LABEL}_{model}_change", args=[pk])
    return str(format_html('<a href="{}">{}</a>', with_database(url, alias), text))


def _ids(text: str, uuid_column: str, *number_columns: str) -> list[dict[str, Any]]:
    """Conditions for a text that is an id."""
    if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX:
        return [{column: int(text)} for column in number_columns]
    try:
        return [{uuid_column: UUID(text)}]
    except ValueError:
        return []
