"""`outbox schedule`, and `outbox publish --at`."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

NIGHTLY = ("schedule", "add", "nightly", "30 2 * * *", "--type", "report.due")


def test_adding_shows_the_next_runs_in_their_zone(here: Command) -> None:
    result = here(*NIGHTLY, "--timezone", "Asia/Kolkata", "--payload", '{"n": 1}')
    run = r"\d{4}-\d\d-\d\d 02:30\+05:30"
    wanted = f'schedule "nightly" runs at {run}, then at {run}, {run}\n'
    assert re.fullmatch(wanted, result.out), result.out
    again = here(*NIGHTLY)
    assert again.code == 2
    assert again.error == 'schedule "nightly" exists already; use replace to change it'
    changed = here(*NIGHTLY, "--replace", "--misfire", "skip", "--grace", "5m", "--json").json
    assert (changed["timezone"], changed["misfire"], changed["grace_s"]) == ("UTC", "skip", 300.0)
    assert len(changed["next_runs"]) == 3
    assert changed["payload"] == {}


INVALID_SCHEDULES = (
    (("x", "30 2 30 2 *", "--type", "a"), 'cron: "30 2 30 2 *": bad day-of-month'),
    (("x", "@often", "--type", "a"), 'cron: "@often" is not a nickname; use one of: @yearly'),
    (("x", "@daily", "--type", "a", "--timezone", "Berlin"), 'did you mean "Europe/Berlin"?'),
    (("x y", "@daily", "--type", "a"), "name: 'x y' is not 1 to 100 letters"),
    (("x", "@daily", "--type", "a b"), "type: 'a b' is not dot-separated"),
    (("x", "@daily", "--type", "a", "--payload", "{"), "payload: not JSON"),
    (
        ("x", "@daily", "--type", "a", "--header", "X-Schedule=1"),
        "is reserved for the schedule",
    ),
    (("x", "@daily"), "missing option '--type'"),
    (("x", "@daily", "--type", "a", "--misfire", "never"), "'never' is not one of"),
)


def test_an_invalid_schedule_is_reported_in_one_line(
    here: Command, subtests: pytest.Subtests
) -> None:
    for arguments, says in INVALID_SCHEDULES:
        with subtests.test(arguments=arguments, says=says):
            result = here("schedule", "add", *arguments)
            assert result.code == 2
            assert says in result.error
            assert here("schedule", "list", "--json").json["schedules"] == []


def test_schedules_are_listed_and_shown(here: Command) -> None:
    empty = here("schedule", "list").out
    assert empty == (
        "no schedules; add one with: outbox schedule add NAME CRON --type TYPE\nno delayed events\n"
    )
    here(*NIGHTLY, "--timezone", "Asia/Kolkata")
    here("schedule", "add", "weekly", "@weekly", "--type", "a.b", "--key", "k")
    here("schedule", "pause", "weekly", "--comment", "too many")
    here("publish", "a.b", "--at", "2100-01-01T00:00:00Z")
    heading, nightly, weekly, waiting = here("schedule", "list").out.splitlines()
    assert heading.split() == [
        "NAME", "CRON", "ZONE", "TYPE", "STATE", "NEXT_RUN", "IN", "LAST_RUN",
    ]  # fmt: skip
    assert re.search(r"30 2 \* \* \* +Asia/Kolkata +report.due +active +\S+ 02:30\+05:30", nightly)
    assert re.search(r"@weekly +UTC +a.b +paused +- +- +-", weekly)
    assert re.fullmatch(r"1 event delayed; the first is due in \d{5}d( .*)?", waiting)
    listed = here("schedule", "list", "--limit", "1", "--json")
    assert [each["name"] for each in listed.json["schedules"]] == ["nightly"]
    future = listed.json["future_events"]
    assert (future["events"], future["first_at"]) == (1, "2100-01-01T00:00:00Z")
    assert listed.err == "more rows exist; next page: --after nightly\n"
    (rest,) = here("schedule", "list", "--after", "nightly", "--json").json["schedules"]
    assert rest["next_runs"] == []
    shown = here("schedule", "show", "weekly").out
    for line in ("cron         @weekly in UTC", "comment      too many", "key          k"):
        assert line in shown.splitlines()


def test_a_schedule_is_paused_resumed_and_removed(here: Command) -> None:
    here(*NIGHTLY)
    assert here("schedule", "pause", "nightly").out == 'schedule "nightly" is paused\n'
    stays = 'schedule "nightly" is still paused; resume it with: outbox schedule resume nightly\n'
    assert here(*NIGHTLY, "--replace").out == stays
    run = here("schedule", "run-now", "nightly", "--json").json["id"]
    assert here("schedule", "show", "nightly", "--json").json["last_event"] == run
    resumed = here("schedule", "resume", "nightly").out
    assert re.fullmatch(r'resumed schedule "nightly"; next run at \S+ 02:30\+00:00\n', resumed)
    assert here("schedule", "remove", "nightly").out == 'removed schedule "nightly"\n'
    gone = here("schedule", "run-now", "nightly")
    assert gone.code == 2
    assert gone.error == 'there is no schedule "nightly"; see: outbox schedule list'
    here(*NIGHTLY)
    assert here("schedule", "remove", "nightly", "--json").json == [{"removed": "nightly"}]


def test_a_schedule_that_waits_for_its_last_run_is_shown_as_such(
    here: Command, database: Database
) -> None:
    here(*NIGHTLY, "--overlap", "wait")
    run = here("schedule", "run-now", "nightly", "--json").json["id"]
    assert here("schedule", "show", "nightly", "--json").json["waits"] is False
    due = "UPDATE schedule SET next_at = now() - interval '9 min'"
    asyncio.run(fetchval(database, f"{due}, due_at = now() - interval '9 min'"))
    (listed,) = here("schedule", "list").out.splitlines()[1:-1]
    assert re.search(r" due ", listed)
    asyncio.run(fetchval(database, f"{due}, due_at = now() + interval '1 min'"))
    (listed,) = here("schedule", "list").out.splitlines()[1:-1]
    assert re.search(r" waits ", listed)
    assert re.search(
        rf"next runs +after the run of \S+ \S+ has ended; see: outbox trace {run}",
        here("schedule", "show", "nightly").out,
    )
    assert here("schedule", "show", "nightly", "--json").json["waits"] is True


def test_an_event_is_published_for_later(here: Command) -> None:
    later = here(
        "publish", "a.b", "--at", "2100-01-01T01:00:00+01:00", "--once", "k", "--json"
    ).json
    assert later["already"] is False
    taken = here("publish", "a.b", "--deliver-at", "2100-01-01T01:00:00+01:00", "--once", "k")
    assert taken.out == 'not published: the idempotency key "k" was already taken\n'
    output = here("publish", "a.b", "--at", "2100-01-01T00:00:00Z").out
    assert re.fullmatch(r"published \S+, due 2100-01-01 \d\d:00:00\+\d\d:\d\d\n", output)
    for wrong, says in (
        ("2100-01-01T00:00", "has no time zone; write 2100-01-01T00:00Z or"),
        ("tomorrow", '"tomorrow" is not a time such as 2027-01-31T09:00:00Z'),
    ):
        result = here("publish", "a.b", "--at", wrong)
        assert result.code == 2
        assert says in result.error
    assert here("schedule", "list", "--json").json["future_events"]["events"] == 2
