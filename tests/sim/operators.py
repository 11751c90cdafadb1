"""Operators: commands that change lanes, pause, resume, replay and discard."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.ids import lane_name
from outbox.core.model.start import BEGINNING
from outbox.core.schedules.schedule import ScheduleSettings
from outbox.errors import OutboxError
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.endpoints.states import require_state
from tests.sim.clients import TENANTS
from tests.sim.database.connection import Connection
from tests.sim.database.positions import take_position
from tests.sim.database.tables import SCHEMA
from tests.sim.moments import EVENT
from tests.sim.operational import RESERVED
from tests.sim.stores import (
    backfill,
    discard,
    endpoint_changes,
    endpoint_states,
    endpoint_writes,
    migrate,
    operational_events,
    replay_jobs,
    replays,
    schedule_changes,
    skip,
)
from tests.sim.stores.change import make_change
from tests.sim.timetable import GRIDS

if TYPE_CHECKING:
    import random
    from collections.abc import Collection
    from uuid import UUID

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.core.model.position import Position
    from tests.sim.simulation import Simulation
    from tests.sim.stores.change import Change
    from tests.sim.timetable import Kind

    Taken = tuple[Position, Collection[UUID]]
    """A position, and the events that its snapshot contains."""

TROUBLE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, OutboxError)


class Operator:
    """Executes random commands, and at the end those that let all work complete."""

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self._sim = simulation
        self._rng = rng
        self._acting: list[asyncio.Task[Any]] = []
        self._kept: Taken | None = None

    def act_soon(self, _: str) -> None:
        """Execute a command at a moment at which it may interfere, whatever the others do."""
        self._acting.append(self._sim.operator_process.run(self._act_later()))

    def stop(self) -> None:
        """Execute no more commands."""
        for each in self._acting:
            each.cancel()

    async def _act_later(self) -> None:
        # While an event is read, sequenced or sent, or some time later.
        await asyncio.sleep(self._rng.choice((0.002, 0.02, 60.0)) * self._rng.random())
        await self._act()

    async def backfill_soon(self) -> None:
        """Request a backfill while a gap is open."""
        rng, db = self._rng, self._sim.database
        await asyncio.sleep(rng.choice((0.1, 1.0)) * rng.random())
        name = rng.choice(list(db.endpoint.rows.values()))["name"]
        rate_per_s = rng.choice((None, 20.0, 0.5))
        wanted = Criteria(name, since=db.later(-60.0))
        await self._try(backfill.request_backfill, wanted, rate_per_s=rate_per_s)

    def pause_soon(self, _: str) -> None:
        """Pause the endpoint with the most pending deliveries, for some time."""
        self._acting.append(self._sim.operator_process.run(self._pause()))

    async def _pause(self) -> None:
        db = self._sim.database
        pending: Counter[UUID] = Counter()
        for row in db.lane_progress.rows.values():
            last_seq = db.lane_counter.rows[row["lane_id"]]["last_seq"]
            pending[row["endpoint_id"]] += last_seq - row["acked_seq"]
        ((endpoint_id, _),) = pending.most_common(1)
        name = db.endpoint.rows[endpoint_id]["name"]
        await self._try(endpoint_states.pause_endpoints, [name])
        await asyncio.sleep(self._rng.choice((3.0, 60.0)))
        await self._try(endpoint_states.resume_endpoints, [name])

    def disable_soon(self, _: str) -> None:
        """Disable an endpoint for some time."""
        self._acting.append(self._sim.operator_process.run(self._disable_for_some_time()))

    async def _disable_for_some_time(self) -> None:
        rng, db = self._rng, self._sim.database
        name = rng.choice(list(db.endpoint.rows.values()))["name"]
        await self._disable(name)
        missed_s = rng.choice((0.1, 5.0, 60.0, 600.0))
        for _ in range(5):
            await asyncio.sleep(missed_s * rng.random())
            await self._enable(name)

    def interfere_soon(self, _: str) -> None:
        """Change an endpoint that is being fed."""
        self._acting.append(self._sim.operator_process.run(self._interfere()))

    async def _interfere(self) -> None:
        rng, db = self._rng, self._sim.database
        await asyncio.sleep(rng.expovariate(rng.choice((300, 30, 1))))
        fed = [f["endpoint_id"] for f in db.feed.rows.values() if f["ended_at"] is None]
        if not fed:
            return
        endpoint = db.endpoint.rows[rng.choice(fed)]
        name, u = endpoint["name"], rng.random()
        if u < 0.3:
            await self._disable(name)
            await asyncio.sleep(rng.choice((0.5, 20.0)) * rng.random())
            await self._enable(name)
        elif u < 0.5:
            await self._enable(name)
        elif u < 0.7:
            await self._change_lanes(name, rng.choice((1, 2, 3, 4)))
        elif u < 0.9:
            await self._change_types(name)
        else:
            await self._try(endpoint_states.pause_endpoints, [name])

    def add_soon(self, _: str) -> None:
        """Add an endpoint that begins at an earlier place."""
        self._acting.append(self._sim.operator_process.run(self._add()))

    async def _add(self) -> None:
        rng, sim = self._rng, self._sim
        begins: list[Any] = [BEGINNING, timedelta(seconds=rng.choice((1, 60, 600)))]
        taken = await self._take_position()
        if taken is not None:
            begins += [taken[0]] * 5
        await asyncio.sleep(rng.choice((0.0, 1.0, 60.0, 600.0)) * rng.random())
        start = rng.choice(begins)
        if taken is not None and start is taken[0]:
            await self._begin_at(taken)
        else:
            await self._try(endpoint_changes.add_endpoint, sim.new_settings(), start=start)

    async def _begin_at(self, taken: Taken) -> None:
        position, contained = taken
        settings = self._sim.new_settings()
        self._sim.checker.fed.starts[settings.name] = contained
        await self._try(endpoint_changes.add_endpoint, settings, start=position)

    async def _take_position(self) -> Taken | None:
        connection = self._application()
        with suppress(*TROUBLE):
            await connection.open()
            return await self._take_position_on(connection)
        return None

    async def _take_position_on(self, connection: Connection) -> Taken | None:
        try:
            return await connection.call(take_position)
        except TROUBLE:
            return None
        finally:
            connection.terminate()

    def _application(self) -> Connection:
        return Connection(self._sim.database, self._sim.operator_process, "application")

    def keep_position(self) -> None:
        """Keep a position that has seen the next event before it is sequenced."""
        self._acting.append(self._sim.operator_process.run(self._keep_position()))

    async def _keep_position(self) -> None:
        connection, moments = self._application(), self._sim.checker.moments
        with suppress(*TROUBLE):
            await connection.open()

        async def keep() -> None:
            self._kept = await self._take_position_on(connection)

        def keep_at_once(_: str) -> None:
            self._acting.append(self._sim.operator_process.run(keep()))

        moments.at(EVENT, moments.counts[EVENT] + 1, keep_at_once)

    def use_kept_position(self, after_s: float) -> None:
        """Begin an endpoint at the kept position, whatever has happened to the database."""

        async def use() -> None:
            await asyncio.sleep(after_s)
            if self._kept is not None:
                await self._begin_at(self._kept)

        self._acting.append(self._sim.operator_process.run(use()))

    async def _enable(self, name: str) -> None:
        """Enable an endpoint, mostly with what it has missed."""
        catch_up = self._rng.random() < 0.6
        await self._try(endpoint_states.enable_endpoint, name, catch_up=catch_up)

    async def _change_types(self, name: str) -> None:
        """Subscribe to all ordinary types, or to some."""
        some = self._rng.choice((("**",), ("t0.changed", "t1.changed"), ("t1.changed",)))

        def edit(settings: EndpointSettings) -> EndpointSettings:
            reserved = tuple(each for each in settings.types if each.startswith(RESERVED))
            return replace(settings, types=(*some, *reserved))

        await self._try(endpoint_changes.update_endpoint, name, edit)

    async def settle(self) -> None:
        """Enable, resume and unblock everything, until cancelled."""
        db = self._sim.database
        while True:
            await asyncio.sleep(5)
            for endpoint in list(db.endpoint.rows.values()):
                state, name = endpoint["state"], endpoint["name"]
                if state == "disabled":
                    await self._enable(name)
                blocked = any(
                    db.lane.rows[b]["endpoint_id"] == endpoint["id"] for b in db.lane_block.rows
                )
                # If the clock was set back, a hold of a minute may last an hour.
                rest_until = db.endpoint_health.rows[endpoint["id"]]["held_until"]
                held = rest_until is not None and rest_until > db.wall() + 60
                if state == "paused" or (state == "active" and (blocked or held)):
                    await self._try(endpoint_states.resume_endpoints, [name])

    async def _act(self) -> None:
        rng = self._rng
        if self._sim.database.schedule.rows and rng.random() < 0.2:
            await self._act_on_schedules()
            return
        endpoints = list(self._sim.database.endpoint.rows.values())
        name = rng.choice(endpoints)["name"]
        if rng.random() < 0.2:
            # Two operators who do not know of each other plan at the same time.
            async with asyncio.TaskGroup() as both:
                both.create_task(self._change(name))
                both.create_task(self._change(name))
        else:
            await self._change(name)
        if rng.random() < 0.5:
            await self._send_again(rng.choice(endpoints)["name"])

    async def _change(self, name: str) -> None:
        """Change an endpoint, or decide about its deliveries."""
        u = self._rng.random()
        if u < 0.22:
            await self._change_lanes(name, self._rng.choice((1, 2, 3, 4)))
        elif u < 0.3:
            await self._change_types(name)
        elif u < 0.45:
            await self._try(endpoint_states.pause_endpoints, [name])
        elif u < 0.65:
            await self._try(endpoint_states.resume_endpoints, [name])
        elif u < 0.72:
            await self._disable(name)
        elif u < 0.78:
            await self._enable(name)
        elif u < 0.85:
            await self._skip()
        elif u < 0.93:
            await self._try(replays.start_replay, DeadLetterSelection(everything=True))
        else:
            await self._try(discard.discard_dead_letters, DeadLetterSelection(everything=True))

    async def _skip(self) -> None:
        """Skip the next delivery of a lane, or one that has just ended or waits behind it."""
        db = self._sim.database
        found = [row for row in db.lane.rows.values() if self._is_pending(row["id"])]
        if not found:
            return
        lane = self._rng.choice(found)
        sequence = db.lane_progress.rows[lane["id"]]["acked_seq"] + self._rng.choice((0, 1, 1, 2))
        place = lane_name(lane["endpoint_id"], lane["generation"], lane["slot"])
        name = db.endpoint.rows[lane["endpoint_id"]]["name"]
        await self._try(skip.skip_delivery, name, place, sequence)

    def _is_pending(self, lane_id: int) -> bool:
        db = self._sim.database
        last_seq = db.lane_counter.rows[lane_id]["last_seq"]
        return bool(last_seq > db.lane_progress.rows[lane_id]["acked_seq"])

    async def _send_again(self, name: str) -> None:
        """Request a replay or a backfill, and abort some of them."""
        rng = self._rng
        u = rng.random()
        rate_per_s = rng.choice((None, None, 20.0, 0.5))
        if u < 0.25:
            await self._try(
                replays.start_replay, DeadLetterSelection(everything=True), rate_per_s=rate_per_s
            )
        elif u < 0.5:
            await self._replay_some()
        else:
            # The whole history would take longer than the run.
            since = self._sim.database.later(-rng.choice((0.1, 10.0, 60.0, 600.0)))
            await self._try(
                backfill.request_backfill, Criteria(name, since=since), rate_per_s=rate_per_s
            )
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0.01, 0.1, 1.0)) * rng.random())
            await self._abort()

    async def _replay_some(self) -> None:
        """Replay dead letters by their ids."""
        letters = self._sim.database.dead_letter.rows.values()
        ids = [row["id"] for row in letters if row["state"] == "dead"]
        if ids:
            some = tuple(self._rng.sample(ids, min(len(ids), 2)))
            await self._try(replays.start_replay, DeadLetterSelection(ids=some))

    async def _abort(self) -> None:
        jobs = self._sim.database.replay_job.rows.values()
        running = [row["id"] for row in jobs if row["state"] == "running"]
        if running:
            await self._try(replay_jobs.abort_job, self._rng.choice(running))

    async def migrate(self) -> None:
        """Migrate the table that producers write to."""
        await self._try(migrate.alter_outbox)

    async def add_schedules(self, count: int) -> None:
        """Add schedules, and one for the special time of the run, if it has one."""
        occasion = self._sim.occasion
        for n in range(count):
            await self._add_schedule(f"s{n}", self._rng.choice(GRIDS))
        if occasion is not None:
            await self._add_schedule("occasion", occasion)

    async def _add_schedule(self, name: str, kind: Kind, **options: Any) -> None:
        settings = ScheduleSettings(
            name=name,
            tenant=self._rng.choice((None, *TENANTS)),
            cron=kind.cron,
            timezone=kind.timezone,
            type="t0.changed",
            payload={"k": None, "v": 0},
            misfire=self._rng.choice(("all", "all", "once", "skip")),
            grace_s=self._sim.settings.lease_s,
            overlap=self._rng.choice(("allow", "allow", "wait")),
        )
        await self._try(schedule_changes.add_schedule, settings, **options)

    async def _act_on_schedules(self) -> None:
        rng = self._rng
        name = rng.choice([row["name"] for row in self._sim.database.schedule.rows.values()])
        u = rng.random()
        if u < 0.3:
            await self._try(schedule_changes.run_schedule_now, name)
        elif u < 0.5:
            await self._try(schedule_changes.pause_schedules, [name])
        elif u < 0.8:
            await self._try(schedule_changes.resume_schedules, [name])
        elif name != "occasion":
            await self._add_schedule(name, rng.choice(GRIDS), replace=True)

    async def _change_lanes(self, name: str, lanes: int) -> None:
        await self._try(endpoint_changes.update_endpoint, name, lambda s: replace(s, lanes=lanes))

    async def _disable(self, name: str) -> None:
        """Disable an endpoint as its owner does after three days of failures or a 410."""

        async def command(connection: Connection, schema: str, *, actor: str) -> None:
            async def plan(change: Change) -> None:
                found = await endpoint_changes.find_endpoint(change, name)
                require_state(found, ("active", "paused"), "disabled")
                change.write(endpoint_writes.end_subscriptions, [found.id])
                change.write(endpoint_writes.stop_feeds, [found.id], "disabled")
                change.write(endpoint_writes.set_states, [found.id], "disabling", actor, None)
                change.write(operational_events.publish_endpoint_disabled, found.id, None)
                change.journal("endpoint_disabling", found.id, {}, batch_as="to_batch")

            await make_change(connection, schema, actor, plan)

        await self._try(command)

    async def _try(self, command: Any, *args: Any, **options: Any) -> None:
        connection = Connection(self._sim.database, self._sim.operator_process, "outbox")
        try:
            await connection.open()
            self._sim.plan.on_command(connection)
            await command(connection, SCHEMA, *args, actor="operator", **options)
            self._sim.log(f"operator: {command.__name__} {args[0] if args else ''}")
        except TROUBLE as error:
            self._sim.log(f"operator: {type(error).__name__}: {error}")
        finally:
            connection.terminate()
