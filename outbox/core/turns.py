"""Who may begin a request now, and who has to wait for a turn.

A relay has at most `in_flight_max` requests open.  They are shared so that nobody, whatever
it does, takes them from all others:

    part     whose                                    at most (of 1,024)
    quick    of endpoints that answer within SLOW_S   1/2 (512), no longer than SLOW_S each
    new      of endpoints that have not shown that    1/4 (256) of the quick part
    slow     of all others, and of those whose        1/4 (256) begin; more than that only by
             health lets only probes through          requests that were moved here

A request that is open for longer than `SLOW_S` is **moved** to the slow part, which makes
room in the quick one, and its endpoint is slow from then on: for `SLOW_MIN_S`, and for
`PENANCE` seconds for each that it took too long.  Then it is new, until it answers quickly.
So quick ones wait for quick ones alone, and one that is quick and slow by turns gains little:
what it was given as a quick one it pays for.

**Nobody takes a part alone.**  Who has as many requests of a part as there is room left in it
has to wait, even if nobody else wants the room: one endpoint gets half of it, two a third each,
and whoever comes next finds room at once.  It goes by tenant for endpoints of a tenant, and by
endpoint for all others, which are bounded together, too, while tenants wait.

While the slow part holds more than its due because many became slow at once, quick ones have to
wait as soon as they have `free² / in_flight_max`: the less is left, the less of it does one get.
What a tenant's new endpoints have counts with its slow requests: together, and with those that
were moved, they leave a quarter of the slow part to others, or else the tenant begins nothing
that is quick.

**Among those who wait** the turn goes to the tenant that has the fewest requests in the part,
then to its endpoint that has the fewest, then to the lane that has waited for the longest.  Of
those that have as many it goes to the one that was served longest ago (see `least_first`).
All endpoints without a tenant count as one tenant here.

An endpoint and a tenant have limits of their own, to requests at once and to requests begun
in a second.  Who waits because of these is in nobody's way.

Nothing here depends on the number of endpoints, and while nobody waits a turn costs a few
additions.  Times are seconds of any steady clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count

from outbox.core.least_first import LeastFirst
from outbox.core.lines import Line, Part, Tenant, Turn, Why
from outbox.core.rate import RESOLUTION_S, Rate

SLOW_S = 1.0
"""An answer that takes longer is slow."""
SLOW_MIN_S, SLOW_MAX_S = 10.0, 600.0
"""Bounds of the time for which an endpoint is slow after a request that was."""
PENANCE = 10.0
"""So many seconds for each second, so that nobody is slow for more than a tenth of the time
and holds places of the quick."""


_PARTS = tuple(Part)
_AFTER = (Part.NEW, Part.SLOW, Part.QUICK)
_ROOM = (Why.QUICK, Why.NEW, Why.SLOW)


class Turns:
    """All turns of a relay.

    Args:
        in_flight_max: requests at one time.
        tenant_in_flight_max: of one tenant; None: no limit.
        tenant_rate_per_s: begun in a second for one tenant; None: no limit.
    """

    def __init__(
        self,
        in_flight_max: int,
        tenant_in_flight_max: int | None = None,
        tenant_rate_per_s: float | None = None,
    ) -> None:
        self.in_flight_max = in_flight_max
        self.quick_max = in_flight_max - in_flight_max // 2
        self.new_max = max(self.quick_max // 2, 1)
        self.slow_max = max(in_flight_max // 4, 1)
        # New ones become slow ones, which must not add up without end.
        self.unproven_max = max(in_flight_max // 2, self.slow_max + 1)
        self.tenant_unproven_max = max(self.slow_max * 3 // 4, 2)
        self._tenant_in_flight_max = tenant_in_flight_max
        self._tenant_rate_per_s = tenant_rate_per_s
        self._tenants: dict[str, Tenant] = {}
        self._nobody = Tenant(None, None)
        # The tenants of which somebody waits for room, by part.
        self._rings = (LeastFirst[Tenant](), LeastFirst[Tenant](), LeastFirst[Tenant]())
        # The oldest first: none is open for longer than SLOW_S, once that was looked at.
        self._young: OrderedDict[Turn, None] = OrderedDict()
        self.quick = self.new = self.slow = 0
        self.waiting = 0
        # Whose turn it is when there is room for one alone.
        self._next = Part.QUICK
        # When something can be had that waits for a time.
        self._timers: list[tuple[float, int, Line | Tenant]] = []
        self._ticket = count()

    # ------------------------------------------------------------- endpoints

    def join(self, tenant: str | None, in_flight_max: int | None, rate_per_s: float | None) -> Line:
        """An endpoint is there from now on."""
        line = Line(self._member(tenant))
        line.in_flight_max = in_flight_max
        line.rate = None if rate_per_s is None else Rate(rate_per_s)
        return line

    def leave(self, line: Line) -> None:
        """An endpoint is gone; nothing of it is open or waits."""
        self._forget(line.tenant)

    def change(
        self,
        line: Line,
        tenant: str | None,
        in_flight_max: int | None,
        rate_per_s: float | None,
        now: float,
    ) -> list[Turn]:
        """An endpoint's settings were changed; returns the turns that begin with that."""
        line.in_flight_max = in_flight_max
        if rate_per_s is None:
            line.rate = None
        elif line.rate is None:
            line.rate = Rate(rate_per_s)
        else:
            line.rate.change(rate_per_s, now)
        was = line.tenant
        if was.name != tenant:
            if line.part is not None:
                was.lines[line.part].discard(line)
                line.part = None
            its = line.tenant = self._member(tenant)
            for each, sign in ((was, -1), (its, 1)):
                each.quick += sign * line.quick
                each.new += sign * line.new
                each.slow += sign * line.slow
                each.waiting += sign * len(line.waiting)
            self._place_tenant(was, now)
            self._forget(was)
        self._place(line, now)
        return self._grant(now)

    # ----------------------------------------------------------------- turns

    def ask(self, turn: Turn, now: float, *, probed: bool = False) -> bool:
        """Begin a request, or wait for the turn to; whether it begins.

        Args:
            probed: the endpoint's health lets only probes through.
        """
        line = turn.line
        tenant = line.tenant
        line.probed = probed
        if not self.waiting:
            self._age(now)
        # Nobody passes those of its endpoint, nor those that a second's limit of its tenant
        # keeps waiting, although the time for that may have come just now.
        if not line.waiting and tenant.wake_at is None:
            part = self._part(line, now)
            if self._held(line, now) is None and self._has_room(line, part):
                self._begin(turn, part, now)
                if tenant.waiting:
                    self._place(line, now)
                return True
        turn.waiting = True
        line.waiting[turn] = None
        tenant.waiting += 1
        self.waiting += 1
        self._place(line, now)
        return False

    def end(self, turn: Turn, now: float, *, answered: bool = True) -> list[Turn]:
        """A request ended; returns the turns that begin with that.

        Args:
            answered: what it took says something about its endpoint.
        """
        line = turn.line
        took_s = now - turn.began_at
        self._leave_part(turn)
        turn.open = False
        if took_s > SLOW_S:
            self._was_slow(line, now, PENANCE * (took_s - SLOW_S))
        elif answered:
            line.proven = True
        if not self.waiting:
            return []
        if line.tenant.waiting:
            self._place(line, now)
        return self._grant(now)

    def withdraw(self, turn: Turn, now: float) -> None:
        """A turn is not waited for any more."""
        line = turn.line
        turn.waiting = False
        del line.waiting[turn]
        line.tenant.waiting -= 1
        self.waiting -= 1
        self._place(line, now)

    def wake(self, now: float) -> list[Turn]:
        """Time has passed; returns the turns that begin with that."""
        self._age(now)
        timers = self._timers
        while timers and timers[0][0] <= now + RESOLUTION_S:
            at, _, who = heapq.heappop(timers)
            if who.wake_at != at:
                continue
            who.wake_at = None
            if isinstance(who, Line):
                self._place(who, now)
            else:
                self._place_tenant(who, now)
        return self._grant(now)

    def wake_at(self) -> float | None:
        """When to call `wake`, if nothing happens before; None: something has to."""
        if not self.waiting:
            return None
        timers = self._timers
        while timers and timers[0][2].wake_at != timers[0][0]:
            heapq.heappop(timers)
        at = timers[0][0] if timers else None
        if self._young:
            old_at = next(iter(self._young)).began_at + SLOW_S
            at = old_at if at is None else min(at, old_at)
        return at

    def why(self, line: Line, now: float) -> Why | None:
        """What the lanes of an endpoint wait for; None: they do not."""
        if not line.waiting:
            return None
        return self._held(line, now) or _ROOM[self._part(line, now)]

    # ----------------------------------------------------------- what is open

    def _begin(self, turn: Turn, part: Part, now: float) -> None:
        line = turn.line
        tenant = line.tenant
        turn.open = True
        turn.began_at = line.served_at = tenant.served_at = now
        turn.part = part
        if part is Part.SLOW:
            line.slow += 1
            tenant.slow += 1
            self.slow += 1
        else:
            line.quick += 1
            tenant.quick += 1
            self.quick += 1
            self._young[turn] = None
            if part is Part.NEW:
                line.new += 1
                tenant.new += 1
                self.new += 1
        if line.rate is not None:
            line.rate.take(now)
        if tenant.rate is not None:
            tenant.rate.take(now)

    def _leave_part(self, turn: Turn) -> None:
        line = turn.line
        tenant = line.tenant
        if turn.part is Part.SLOW:
            line.slow -= 1
            tenant.slow -= 1
            self.slow -= 1
            return
        line.quick -= 1
        tenant.quick -= 1
        self.quick -= 1
        del self._young[turn]
        if turn.part is Part.NEW:
            line.new -= 1
            tenant.new -= 1
            self.new -= 1

    def _age(self, now: float) -> None:
        """Move what has been open for too long to the slow part."""
        while self._young:
            turn = next(iter(self._young))
            if turn.began_at + SLOW_S > now + RESOLUTION_S:
                return
            line = turn.line
            self._leave_part(turn)
            turn.part = Part.SLOW
            line.slow += 1
            line.tenant.slow += 1
            self.slow += 1
            self._was_slow(line, now, 0.0)
            if self.waiting:
                self._place(line, now)

    @staticmethod
    def _was_slow(line: Line, now: float, penance_s: float) -> None:
        until = max(line.slow_until, now) + penance_s
        line.slow_until = min(max(until, now + SLOW_MIN_S), now + SLOW_MAX_S)
        line.proven = False

    @staticmethod
    def _part(line: Line, now: float) -> Part:
        if line.slow or line.probed or now < line.slow_until:
            return Part.SLOW
        return Part.QUICK if line.proven else Part.NEW

    # ------------------------------------------------------------------ room

    def _held(self, line: Line, now: float) -> Why | None:
        """The limit of its own that an endpoint or its tenant is at."""
        if line.in_flight_max is not None and line.quick + line.slow >= line.in_flight_max:
            return Why.IN_FLIGHT
        if line.rate is not None and not line.rate.ready(now):
            return Why.RATE
        return self._tenant_held(line.tenant, now)

    def _tenant_held(self, tenant: Tenant, now: float) -> Why | None:
        if not tenant.bounded:
            return None
        most = self._tenant_in_flight_max
        if most is not None and tenant.quick + tenant.slow >= most:
            return Why.TENANT_IN_FLIGHT
        if tenant.rate is not None and not tenant.rate.ready(now):
            return Why.TENANT_RATE
        return None

    def _room(self, part: Part) -> float:
        """Who has so many of the part, or more, has to wait."""
        free = self.in_flight_max - self.quick - self.slow
        if part is Part.SLOW:
            return min(self.slow_max - self.slow, free)
        room = min(self.quick_max - self.quick, free * free / self.in_flight_max)
        if part is Part.NEW:
            if self.new + self.slow >= self.unproven_max:
                return 0
            room = min(room, self.new_max - self.new)
        return room

    def _has_room(self, line: Line, part: Part) -> bool:
        ring, nobody = self._rings[part], self._nobody
        # Those without a tenant are bounded each for itself, and together while tenants wait.
        together = line.tenant is not nobody or ring.first(nobody) is not None
        who = line.tenant if together else line
        has = who.slow if part is Part.SLOW else who.quick
        return has < self._room(part) and not self._overflows(line.tenant, part)

    def _overflows(self, tenant: Tenant, part: Part) -> bool:
        """Whether a tenant has, or may soon have, too much of the slow part."""
        if not tenant.bounded or part is Part.SLOW:
            return False
        most = self.tenant_unproven_max
        return tenant.slow + tenant.new >= most if part is Part.NEW else tenant.slow > most

    # -------------------------------------------------------------- who waits

    def _place(self, line: Line, now: float) -> None:
        """Put an endpoint where it waits, or nowhere."""
        tenant = line.tenant
        part: Part | None = None
        if line.waiting:
            if line.rate is not None and not line.rate.ready(now):
                self._wake(line, line.rate.ready_at)
            elif line.in_flight_max is None or line.quick + line.slow < line.in_flight_max:
                part = self._part(line, now)
                if part is Part.SLOW and now < line.slow_until:
                    self._wake(line, line.slow_until)
        if line.part is not None and line.part is not part:
            tenant.lines[line.part].discard(line)
        line.part = part
        if part is not None:
            has = line.slow if part is Part.SLOW else line.quick
            tenant.lines[part].put(line, has, line.served_at)
        self._place_tenant(tenant, now)

    def _place_tenant(self, tenant: Tenant, now: float) -> None:
        """Put a tenant where its endpoints wait, if it may begin anything."""
        held = None
        if tenant.waiting:
            held = self._tenant_held(tenant, now)
            if held is Why.TENANT_RATE:
                assert tenant.rate is not None
                self._wake(tenant, tenant.rate.ready_at)
        for part, ring, lines in zip(_PARTS, self._rings, tenant.lines, strict=True):
            if not lines:
                if ring:
                    ring.discard(tenant)
            elif held or self._overflows(tenant, part):
                ring.discard(tenant)
            else:
                has = tenant.slow if part is Part.SLOW else tenant.quick
                ring.put(tenant, has, tenant.served_at)

    def _wake(self, who: Line | Tenant, at: float) -> None:
        if who.wake_at is None or at < who.wake_at:
            who.wake_at = at
            heapq.heappush(self._timers, (at, next(self._ticket), who))

    def _grant(self, now: float) -> list[Turn]:
        """Begin what may begin; the parts take turns, because what is free is for all of them."""
        begun: list[Turn] = []
        part, misses = self._next, 0
        while self.waiting and misses < len(_PARTS):
            line = self._first(part) if self._rings[part] else None
            if line is None:
                misses += 1
            else:
                misses = 0
                turn, _ = line.waiting.popitem(last=False)
                turn.waiting = False
                line.tenant.waiting -= 1
                self.waiting -= 1
                self._begin(turn, part, now)
                self._place(line, now)
                begun.append(turn)
            part = _AFTER[part]
        self._next = part
        return begun

    def _first(self, part: Part) -> Line | None:
        """Whose turn it is in a part."""
        room = self._room(part)
        if room <= 0:
            return None
        ring, nobody = self._rings[part], self._nobody
        found, other = ring.first(nobody), nobody.lines[part].first()
        if found is None:
            return None if other is None or other[0] >= room else other[1]
        found = ring.first()
        assert found is not None
        has, tenant = found
        if has >= room:
            return None
        first = tenant.lines[part].first()
        assert first is not None
        return first[1]

    # --------------------------------------------------------------- tenants

    def _member(self, name: str | None) -> Tenant:
        if name is None:
            return self._nobody
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._tenant_rate_per_s)
        tenant.members += 1
        return tenant

    def _forget(self, tenant: Tenant) -> None:
        if tenant.name is None:
            return
        tenant.members -= 1
        if not tenant.members:
            del self._tenants[tenant.name]
