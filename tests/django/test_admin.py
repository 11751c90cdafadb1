"""The models and the admin show rows and change nothing."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from django.db import connections, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils.translation import override

from outbox.core.model.text import safe_lines
from outbox.django import publish
from outbox.errors import UsageError
from tests.django.test_migrations import in_project, run_migrate
from tests.support.hidden_rows import KEY, NAME, SHOWN, add_hidden_rows
from tests.support.old_rows import OLD_ROWS, Refusing, insert_old_rows
from tests.support.relay import OK, Network, add_endpoint, all_ended, running
from tests.support.relay import publish as publish_event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.one_major

PAGE = "https://outbox.example.com"
AUTHORIZATION = "Bearer very-secret-value"


@contextmanager
def signed_in(**options: Any) -> Iterator[Client]:
    """A superuser's browser."""
    from django.contrib.auth.models import User

    run_migrate()
    user = User.objects.create_superuser("admin")
    client = Client()
    client.force_login(user)
    with override_settings(OUTBOX_PAGE_URL=PAGE, **options):
        yield client


def get(client: Client, path: str, code: int = 200) -> str:
    response = client.get(f"/admin/{path}")
    assert response.status_code == code, (response.status_code, response.headers)
    return str(response.content.decode())


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.partition('id="main"')[2]))


@pytest.mark.usefixtures("site")
def test_models_are_read_only() -> None:
    from outbox.django.models import DeadLetter, Endpoint, Event

    with transaction.atomic():
        publish("order.paid", {"order": 7}, key="k", headers={"a": "b"}, tenant="acme")
    event = Event.objects.get()
    assert (event.type, event.key, event.tenant) == ("order.paid", "k", "acme")
    assert (event.payload, event.headers) == ({"order": 7}, {"a": "b"})
    for model in (Event, Endpoint, DeadLetter):
        for change in (
            lambda model=model: model.objects.create(),
            lambda model=model: model.objects.update(type="x"),
            lambda model=model: model.objects.all().delete(),
            lambda model=model: model.objects.bulk_create([]),
            lambda model=model: model().save(),
            lambda model=model: model().delete(),
        ):
            with pytest.raises(UsageError, match="the model is read-only"):
                change()
    with pytest.raises(UsageError, match=r"use outbox\.django\.publish"):
        event.save()
    assert Event.objects.get().type == "order.paid"


async def test_models_without_a_selected_database_read_one_that_has_the_schema(
    database: Database, server: Server
) -> None:
    def run() -> None:
        from outbox.django.models import Event

        with transaction.atomic(using="events"):
            publish("order.paid", {}, key="there", using="events")
        assert [each.key for each in Event.objects.all()] == ["there"]
        assert not Event.objects.using("default").exists()

    async with server.database() as events:
        await in_project({"default": database, "events": events}, run, OUTBOX_DATABASES=["events"])


@pytest.mark.usefixtures("site")
def test_events_are_listed_searched_and_shown() -> None:
    from outbox.django.models import Event

    with signed_in() as client:
        with transaction.atomic():
            for n in range(3):
                publish("order.paid", {"order": n, "note": "<b>ü</b>"}, key=f"order-{n}")
            publish("user.added", {}, key="user/1", tenant="acme", headers={"X-Source": "shop"})
        listed = text_of(get(client, "outbox_relay/event/"))
        assert "4 events" in listed
        for text in ("order-0", "order-1", "order-2", "user.added", "acme"):
            assert text in listed
        only = text_of(get(client, "outbox_relay/event/?type=user.added"))
        assert "1 event " in only
        newest, *_, oldest = Event.objects.all()
        for search in ("order-0", str(oldest.event_id), str(oldest.pk)):
            found = text_of(get(client, f"outbox_relay/event/?q={quote(search)}"))
            assert "1 result" in found, search
            assert str(oldest.event_id) in found
        assert "0 events" in text_of(get(client, "outbox_relay/event/?type=a%00b"))
        for search in ("absent", "9" * 30, "' OR 1=1"):
            assert "0 results" in text_of(get(client, f"outbox_relay/event/?q={quote(search)}"))
        shown = get(client, f"outbox_relay/event/{oldest.pk}/change/")
        assert "&quot;note&quot;: &quot;&lt;b&gt;ü&lt;/b&gt;&quot;" in shown
        assert f'href="{PAGE}/#/events/{oldest.event_id}"' in shown
        assert "X-Source" in get(client, f"outbox_relay/event/{newest.pk}/change/")
        with transaction.atomic():
            publish("image.added", b"\0\xff", content_type="image/png")
        added = Event.objects.latest("pk")
        assert "2 bytes of image/png" in get(client, f"outbox_relay/event/{added.pk}/change/")
        assert '<input type="text"' not in shown.partition('id="main"')[2]


@pytest.mark.full
@pytest.mark.usefixtures("site")
def test_the_admin_changes_nothing() -> None:
    from outbox.django.models import Event

    with signed_in() as client:
        with transaction.atomic():
            publish("order.paid", {})
        pk = Event.objects.get().pk
        for model in ("event", "endpoint", "deadletter"):
            get(client, f"outbox_relay/{model}/add/", 403)
        for path in (f"{pk}/change/", f"{pk}/delete/"):
            response = client.post(
                f"/admin/outbox_relay/event/{path}", {"type": "x", "post": "yes"}
            )
            assert response.status_code == 403
        assert Event.objects.get().type == "order.paid"


@pytest.mark.usefixtures("site")
def test_a_user_needs_the_permission_to_view() -> None:
    from django.contrib.auth.models import Permission, User

    with signed_in():
        staff = User.objects.create_user("staff", is_staff=True)
        client = Client()
        client.force_login(staff)
        get(client, "outbox_relay/event/", 403)
        names = Permission.objects.filter(content_type__app_label="outbox_relay")
        assert sorted(each.codename for each in names) == [
            "view_deadletter", "view_endpoint", "view_event",
        ]  # fmt: skip
        staff.user_permissions.add(names.get(codename="view_event"))
        get(client, "outbox_relay/event/")
        get(client, "outbox_relay/endpoint/", 403)


@pytest.mark.full
@pytest.mark.usefixtures("site")
def test_a_large_table_is_neither_counted_nor_read_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox.django.admin.NEWEST", 10)
    with signed_in() as client:
        with transaction.atomic():
            publish("rare.event", {}, key="oldest")
            for n in range(30):
                publish("order.paid", {"large": "x" * 100}, key=f"order-{n}")
        with CaptureQueriesContext(connections["default"]) as queries:
            listed = text_of(get(client, "outbox_relay/event/"))
        assert "10 events" in listed
        assert "rare.event" not in listed
        of_outbox = [each["sql"] for each in queries if '"relay"."outbox"' in each["sql"]]
        assert of_outbox
        for sql in of_outbox:
            assert '"payload"' not in sql
            # Bounded by an id, or by a limit.
            assert re.search(r'"id" > \d+|LIMIT 1 OFFSET 10$', sql), sql
        assert "1 result" in text_of(get(client, "outbox_relay/event/?q=oldest"))


async def test_old_rows_blind_neither_the_models_nor_the_admin(database: Database) -> None:
    await add_endpoint(database)
    async with database.connection() as connection:
        await insert_old_rows(connection)
    async with running(database, Refusing()):
        await all_ended(database)

    def run() -> None:
        from outbox.django.models import DeadLetter, Event

        with signed_in() as client:
            for model, path in ((Event, "event"), (DeadLetter, "deadletter")):
                listed = text_of(get(client, f"outbox_relay/{path}/"))
                shown = {}
                for row in model.objects.all():
                    assert row.key in listed
                    shown[row.key] = get(client, f"outbox_relay/{path}/{row.pk}/change/")
                assert shown.keys() == OLD_ROWS.keys()
                exact = shown["numbers that are rounded"]
                for number in ("9007199254740993", "18446744073709551616", "0.10"):
                    assert number in exact
                assert "0" * 131_000 in shown["an endless number"]
            get(client, "outbox_relay/event/?created_at__gte=2026-01-01%2000:00:00%2B00:00")

    await in_project({"default": database}, run)


async def test_endpoints_and_dead_letters_are_shown_without_secrets(database: Database) -> None:
    from outbox.core.model.response import AttemptResult

    def receive(sent: Any) -> AttemptResult:
        return (
            OK
            if sent.url.endswith("audit")
            else AttemptResult.completed(400, 0.004, body=b"internal: do not show")
        )

    await add_endpoint(
        database, "billing", types=["order.*"], headers={"Authorization": AUTHORIZATION}
    )
    await add_endpoint(database, "audit")
    async with running(database, Network(receive)):
        await publish_event(database, {"order": 17}, type="order.paid", key="order-17")
        await all_ended(database)
    async with database.connection() as connection:
        secrets = [
            r["secret"] for r in await connection.fetch("SELECT * FROM relay.endpoint_secret")
        ]
    assert secrets

    def run() -> None:
        from outbox.django.models import DeadLetter, Endpoint

        with signed_in() as client:
            dead, billing = DeadLetter.objects.get(), Endpoint.objects.get(name="billing")
            pages = [
                get(client, "outbox_relay/endpoint/"),
                get(client, "outbox_relay/endpoint/?q=bill"),
                get(client, f"outbox_relay/endpoint/{billing.pk}/change/"),
                get(client, "outbox_relay/deadletter/"),
                get(client, f"outbox_relay/deadletter/{dead.pk}/change/"),
            ]
            for page in pages:
                for secret in (*secrets, AUTHORIZATION, "do not show"):
                    assert secret not in page
            everything, searched, endpoint, letters, letter = pages
            assert "audit" in everything
            assert "1 endpoint" in text_of(searched) or "1 result" in text_of(searched)
            assert f'href="{PAGE}/#/endpoints/billing"' in endpoint
            assert "order.*" in endpoint
            assert "order-17" in letters
            assert "refused" in text_of(letters)
            assert f'href="{PAGE}/#/dead-letters/{dead.pk}"' in letter
            assert "status 400, after 4 ms" in text_of(letter)
            assert json.dumps("order", ensure_ascii=False).replace('"', "&quot;") in letter
            assert f"/admin/outbox_relay/endpoint/{billing.pk}/change/" in letter
            assert f"/admin/outbox_relay/event/{dead.outbox_id}/change/" in letter
            for query in (f"q={dead.event_id}", "reason=refused", "endpoint_name=billing"):
                found = text_of(get(client, f"outbox_relay/deadletter/?{query}"))
                assert "order-17" in found, query
            # A condition on a hidden column would reveal it, character by character.
            hidden = "last_response__body__startswith=internal", "payload__order=17"
            for query in (*hidden, "endpoint__headers__isnull=False"):
                get(client, f"outbox_relay/deadletter/?{query}", 400)
            get(client, "outbox_relay/deadletter/?at__gte=2020-01-01T00:00:00Z")
            found = get(client, "outbox_relay/deadletter/?q=absent")
            assert "order-17" not in found

    await in_project({"default": database}, run)


@pytest.mark.usefixtures("site")
def test_pages_in_other_languages_keep_the_joiners_of_their_words() -> None:
    """Django's Persian translation has 36 of them."""
    from outbox.django.admin import escape_page

    html = "<td>\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u202eresu</td>\n"
    with override("fa"):
        assert escape_page(html) == html.replace("\u202e", "\\u202e")
    with override("en-gb"):
        assert "\\u200c" in escape_page(html)


def hidden_fields(model_admin: Any) -> list[str]:
    """The fields of a model, and of those that it refers to, that no page of its admin shows."""
    pages = (*model_admin.list_display, *model_admin.fields)
    shown = {each if isinstance(each, str) else each.__name__ for each in pages}
    own = {each.name for each in model_admin.model._meta.fields}
    related = {
        f"{each.name}__{other.name}"
        for each in model_admin.model._meta.fields
        if each.related_model is not None
        for other in each.related_model._meta.fields
    }
    return sorted(own - shown | related)


def lookups_of(model: Any, path: str) -> Iterator[str]:
    """All lookups of a field, also those of its transforms."""
    for name in path.split("__"):
        field = model._meta.get_field(name)
        model = field.related_model
    yield path
    for name, lookup in field.get_lookups().items():
        yield f"{path}__{name}"
        if hasattr(lookup, "get_lookups"):
            yield from (f"{path}__{name}__{each}" for each in lookup.get_lookups())


@pytest.mark.full
async def test_no_hidden_column_can_be_read_bit_by_bit(database: Database) -> None:
    """By a condition, an order, a search or a list for a form."""
    await add_hidden_rows(database)

    def run() -> None:
        from django.contrib import admin

        registered = [
            each
            for each in admin.site._registry.values()
            if each.model._meta.app_label == "outbox_relay"
        ]
        assert len(registered) == 3
        with signed_in() as client:
            for model_admin in registered:
                path = f"outbox_relay/{model_admin.model._meta.model_name}/"
                hidden = hidden_fields(model_admin)
                assert len(hidden) >= 4, path
                for field in hidden:
                    for lookup in lookups_of(model_admin.model, field):
                        assert not model_admin.lookup_allowed(lookup, "x"), (path, lookup)
                shown = (each.name for each in model_admin.model._meta.fields)
                lookups = {each for name in shown for each in lookups_of(model_admin.model, name)}
                allowed = {each for each in lookups if model_admin.lookup_allowed(each, "x")}
                ends = {each.partition("__")[2] for each in allowed}
                assert ends <= {"", "gte", "lt", "isnull"}, path
                columns = [each for each in hidden if "__" not in each]
                for field in columns:
                    get(client, f"{path}?{field}__isnull=False", 400)
                    get(client, f"{path}?_to_field={field}", 400)
                for field in (*columns, "endpoint"):
                    place = {"app_label": "outbox_relay", "model_name": path.split("/")[1]}
                    chosen = {**place, "field_name": field, "term": "X-Request-Id"}
                    response = client.get("/admin/autocomplete/", chosen)
                    # Endpoints are found by what their list shows.
                    if response.status_code != 200:
                        assert response.status_code in (403, 404), (path, field)
                    else:
                        assert (field, response.json()["results"]) == ("endpoint", [])
                count = len(model_admin.list_display) + 1
                for order in range(-count, count + 1):
                    with CaptureQueriesContext(connections["default"]) as queries:
                        get(client, f"{path}?o={order}")
                    ordered = " ".join(each["sql"].partition("ORDER BY")[2] for each in queries)
                    assert [each for each in columns if f'"{each}"' in ordered] == [], (path, order)
                # Of a payload, a header and a response.
                for search in ('"text"', "X-A", "X-Request-Id", "400"):
                    assert "0 results" in text_of(get(client, f"{path}?q={quote(search)}"))

    await in_project({"default": database}, run)


@pytest.mark.full
async def test_no_page_shows_a_hidden_character(database: Database) -> None:
    await add_hidden_rows(database)

    def run() -> None:
        from outbox.django.models import DeadLetter, Endpoint, Event

        with signed_in() as client:
            for model, column in ((Event, "key"), (Endpoint, "name"), (DeadLetter, "key")):
                path = f"outbox_relay/{model._meta.model_name}/"
                row = model.objects.filter(**{column: KEY if column == "key" else NAME}).last()
                for page in (
                    path,
                    f"{path}?q={quote(KEY)}",
                    f"{path}{row.pk}/change/",
                    f"{path}{row.pk}/history/",
                ):
                    shown = get(client, page)
                    assert safe_lines(shown) == shown, page
                    assert SHOWN in shown or page.endswith("history/"), page

    await in_project({"default": database}, run)


@pytest.mark.full
async def test_the_database_is_selected(database: Database, server: Server) -> None:
    def run() -> None:
        from outbox.django.models import Event

        with signed_in() as client:
            with transaction.atomic(using="events"):
                publish("order.paid", {"there": True}, key="there", using="events")
            assert "there" not in text_of(get(client, "outbox_relay/event/"))
            listed = get(client, "outbox_relay/event/?database=events")
            (link,) = re.findall(r'href="(/admin/outbox_relay/event/\d+/change/[^"]*)"', listed)
            assert "database=events" in link
            shown = get(client, link.removeprefix("/admin/").replace("&amp;", "&"))
            assert "&quot;there&quot;: true" in shown
            pk = Event.objects.using("events").get().pk
            # Not an error, but a redirect with a message.
            get(client, f"outbox_relay/event/{pk}/change/", 302)

    async with server.database() as events:
        await in_project(
            {"default": database, "events": events}, run, OUTBOX_DATABASES=["default", "events"]
        )
