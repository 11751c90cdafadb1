"""Who may begin a request now, who has to wait for a turn, and who has had enough of one.

A relay has at most `in_flight_max` requests open.  They are shared so that nobody, whatever
it does, takes them from all others.  Each part has places of its own:

    part     whose requests                                      at most (of 1,024)
    quick    of endpoints that answer within SLOW_S              1/2 (512)
    new      of endpoints that have not shown that               1/4 (256), of the quick ones
    slow     of endpoints that took longer                       1/4 (256)
    moved    quick ones that are open for longer than SLOW_S     1/4 (256), and what slow ones
                                                                 leave of theirs

A quick request that is open for longer than `SLOW_S` is **moved**, which makes room for the
next quick one, and its endpoint is slow from then on: for `SLOW_MIN_S`, and for `PENANCE`
seconds for each that it took too long.  Then it is new, until it answers quickly.

**Called off** is what nobody has to put up with: the request that is open for longest, of
whoever holds most of a part, is ended like one whose time is over,
- of those that were moved, as soon as there is no place for one more;
- of slow ones, once it was open for `HOLD_S`, and only for somebody who waits for its place
  and has less than half as many.
A lane whose request was moved and called off `CUT_MAX` times in a row waits for a slow place,
however long ago that was, and so do those of its endpoint that wait with it: there it is left
alone for `HOLD_S`, and nowhere else.

**Nobody takes a part alone.**  Who has as many requests of a part as there is room left in it
has to wait, even if nobody else wants the room: one endpoint gets half of it, two a third each,
and whoever comes next finds room at once.  It goes by tenant for endpoints of a tenant, and by
endpoint for all others, which are bounded together, too, while tenants wait.

**Among those who wait** the turn goes to the tenant that has the fewest requests in the part,
then to its endpoint that has the fewest, then to the lane that has waited for the longest.  Of
those that have as many it goes to the one that was served longest ago (see `least_first`).
All endpoints without a tenant count as one tenant here.

**What that promises**, from three places on, to a tenant that has nothing open in a part (and,
where there are no tenants, to such an endpoint): while `others` like it wait with it, it waits
for `SLOW_S · (1 + others / places)` at the most if it is quick, and for `HOLD_S` in place of
`SLOW_S` if it is slow.  `places` are those of the part, of the quick one without the new ones;
what was called off has to end at once.  How long receivers take, and what time-outs their
endpoints have, is in neither of them.

An endpoint and a tenant have limits of their own, to requests at once and to requests begun
in a second.  Who waits because of these is in nobody's way.

Nothing here depends on the number of endpoints, and while nobody waits a turn costs a few
additions.  Times are seconds of any steady clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import Line, Part, Tenant, Turn, Why, holder_of
from outbox.core.admission.fair_queue import LeastFirst
from outbox.core.admission.rate_limit import RESOLUTION_S, Rate
from outbox.core.admission.timer_queue import Timers
from outbox.core.admission.usage_index import Holders

if TYPE_CHECKING:
    from collections.abc import Iterable

SLOW_S = 1.0
"""An answer that takes longer is slow."""
SLOW_MIN_S, SLOW_MAX_S = 10.0, 600.0
"""Bounds of the time for which an endpoint is slow after a request that was."""
PENANCE = 10.0
"""So many seconds for each second, so that nobody is slow for more than a tenth of the time
and holds places of the quick."""
HOLD_S = 30.0
"""So long a slow request is left alone, however many wait for its place."""
CUT_MAX = 2
"""So many times in a row the request of a lane is called off soon, at the most."""


# By name: Python 3.11 takes far longer to find the members of an enumeration.
_QUICK, _NEW, _SLOW, _MOVED = Part

_PARTS = (_QUICK, _NEW, _SLOW)
_AFTER = (_NEW, _SLOW, _QUICK)


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
        self.each_max = self.quick_max
        """Of these, whatever room there is, a tenant has no more, nor an endpoint without one."""
        # Together with those that were moved.
        self.long_max = in_flight_max - self.quick_max
        self._tenant_in_flight_max = tenant_in_flight_max
        self._tenant_rate_per_s = tenant_rate_per_s
        self._limits_tenants = tenant_in_flight_max is not None or tenant_rate_per_s is not None
        self._tenants: dict[str, Tenant] = {}
        self._nobody = Tenant(None, None)
        # The tenants of which somebody waits for room, by part.
        self._rings = (LeastFirst[Tenant](), LeastFirst[Tenant](), LeastFirst[Tenant]())
        # The oldest first: none is open for longer than SLOW_S, once that was looked at.
        self._young: OrderedDict[Turn, None] = OrderedDict()
        self.open = self.quick = self.new = self.slow = 0
        # By tenant, or by endpoint if it has none.
        self._slow = Holders[Tenant | Line, Turn]()
        self._moved = Holders[Tenant | Line, Turn]()
        self.called_off: list[Turn] = []
        """Whose requests are to be ended; they are open until then."""
        self.waiting = 0
        # Whose turn it is when there is room for one alone.
        self._next = _QUICK
        # When something can be had that waits for a time.
        self._timers = Timers[Line | Tenant]()

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
            its = self._member(tenant)
            holder = holder_of(line)
            held = [
                (holders, turn)
                for holders in (self._slow, self._moved)
                for turn in holders.of(holder)
                if turn.line is line
            ]
            for holders, turn in held:
                holders.remove(holder, turn)
            line.tenant = its
            for holders, turn in held:
                holders.add(holder_of(line), turn)
            for each, sign in ((was, -1), (its, 1)):
                each.open += sign * line.open
                each.quick += sign * line.quick
                each.new += sign * line.new
                each.slow += sign * line.slow
                each.waiting += sign * len(line.waiting)
            self._place_tenant(was, now)
            self._forget(was)
        self._place(line, now)
        return self._grant(now)

    # ----------------------------------------------------------------- turns

    def ask(self, turn: Turn, now: float) -> list[Turn]:
        """Begin a request, or wait for the turn to.

        Returns:
            The turns that begin with that: this one and maybe others, or none.
        """
        if not self.waiting:
            self._age(now)
            if self._is_plain(turn, now):
                self._begin(turn, _QUICK, now)
                return [turn]
        line = turn.line
        tenant = line.tenant
        # Nobody passes those of its endpoint, nor those that a second's limit of its tenant
        # keeps waiting, although the time for that may have come just now.
        if not line.waiting and tenant.wake_at is None:
            part = _SLOW if turn.cut >= CUT_MAX else self._part(line, now)
            if self._held(line, now) is None and self._has_room(line, part):
                self._begin(turn, part, now)
                if not tenant.waiting:
                    return [turn]
                self._place(line, now)
                # It may be at a limit of its own now, and those without a tenant on their own.
                return [turn, *self._grant(now)]
        turn.waiting = True
        line.waiting[turn] = None
        line.patient += turn.cut >= CUT_MAX
        tenant.waiting += 1
        self.waiting += 1
        # Where others of its endpoint wait for the same room, it waits behind them.
        if line.part is not _QUICK or line.patient:
            self._place(line, now)
        return []

    def end(self, turn: Turn, now: float, *, answered: bool = True) -> list[Turn]:
        """A request ended; returns the turns that begin with that.

        Args:
            answered: there was an answer, so that what it took says something of its endpoint.
        """
        line = turn.line
        took_s = now - turn.began_at
        if not turn.called_off:
            self._leave_part(turn)
        if answered:
            turn.cut = 0
        elif turn.called_off and turn.part is _MOVED:
            turn.cut += 1
        turn.open = False
        line.open -= 1
        line.tenant.open -= 1
        self.open -= 1
        if took_s > SLOW_S:
            self._was_slow(line, now, PENANCE * (took_s - SLOW_S))
        elif answered:
            line.proven = True
        if not self.waiting:
            return []
        if line.part is _QUICK and self.waiting == len(line.waiting) and answered:
            successor = self._hand_over(line, now)
            if successor is not None:
                return [successor]
        if line.tenant.waiting:
            self._place(line, now)
        return self._grant(now)

    def _hand_over(self, line: Line, now: float) -> Turn | None:
        """Begin the next one of an endpoint of which a request has just ended.

        That is what is done most while a single endpoint wants more than it may have: what
        `_grant` does, in fewer steps.  None: that is for `_grant` to do.
        """
        tenant = line.tenant
        if (
            len(line.waiting) == 1
            or line.patient
            or line.open != line.quick
            or now + RESOLUTION_S < line.slow_until
            or line.rate is not None
            or line.in_flight_max is not None
            or (tenant.bounded and self._limits_tenants)
            # There is room for it, and not for more.
            or (tenant.quick if tenant.bounded else line.quick) != self._room(_QUICK) - 1
        ):
            return None
        turn, _ = line.waiting.popitem(last=False)
        self._waits_no_longer(turn)
        self._begin(turn, _QUICK, now)
        # Both have as much as before, but were served now.
        tenant.lines[_QUICK].served(line, now)
        self._rings[_QUICK].served(tenant, now)
        return turn

    def withdraw(self, turns: Iterable[Turn], now: float) -> list[Turn]:
        """These are not waited for any more; returns the turns that begin with that."""
        for turn in turns:
            del turn.line.waiting[turn]
            self._waits_no_longer(turn)
            self._place(turn.line, now)
        # Those without a tenant may have had to wait together because of it.
        return self._grant(now)

    def wake(self, now: float) -> list[Turn]:
        """Time has passed; returns the turns that begin with that."""
        self._age(now)
        due = self._timers.take(now + RESOLUTION_S)
        # All were taken out before any is put back, which ends whatever time they are given.
        for who in due:
            if isinstance(who, Line):
                self._place(who, now)
            else:
                self._place_tenant(who, now)
        begun = self._grant(now)
        while (turn := self._outstaying()) and turn.began_at + HOLD_S <= now + RESOLUTION_S:
            self._call_off(turn, now)
            begun += self._grant(now)
        return begun

    def take_called_off(self) -> list[Turn]:
        """Whose requests are to be ended, since this was last asked."""
        called_off, self.called_off = self.called_off, []
        return called_off

    def wake_at(self) -> float | None:
        """When to call `wake`, if nothing happens before; None: something has to."""
        if not self.waiting:
            return None
        at = self._timers.first()
        if self._young:
            old_at = next(iter(self._young)).began_at + SLOW_S
            at = old_at if at is None else min(at, old_at)
        if self.slow and (turn := self._outstaying()) is not None:
            held_at = turn.began_at + HOLD_S
            at = held_at if at is None else min(at, held_at)
        return at

    def why(self, line: Line, now: float) -> Why | None:
        """What the lanes of an endpoint wait for; None: they do not."""
        if not line.waiting:
            return None
        return self._held(line, now) or _ROOM[self._part(line, now)]

    # ----------------------------------------------------------- what is open

    def _is_plain(self, turn: Turn, now: float) -> bool:
        """Whether it may begin as a quick one, where nobody waits and nothing is limited.

        That is how most of them begin: what `ask` says of all others, in fewer steps.
        """
        line = turn.line
        tenant = line.tenant
        if (
            not line.proven
            or line.open != line.quick
            or now + RESOLUTION_S < line.slow_until
            or turn.cut >= CUT_MAX
            or line.rate is not None
            or line.in_flight_max is not None
            or (tenant.bounded and self._limits_tenants)
        ):
            return False
        has = tenant.quick if tenant.bounded else line.quick
        return (
            has < self.each_max
            and has < self.quick_max - self.quick
            and has < self.in_flight_max - self.open
        )

    def _begin(self, turn: Turn, part: Part, now: float) -> None:
        line = turn.line
        tenant = line.tenant
        turn.open = True
        turn.called_off = False
        turn.began_at = line.served_at = tenant.served_at = now
        turn.part = part
        line.open += 1
        tenant.open += 1
        self.open += 1
        if part is _SLOW:
            line.slow += 1
            tenant.slow += 1
            self.slow += 1
            self._slow.add(holder_of(line), turn)
            self._hold_to_places(now)
        else:
            line.quick += 1
            tenant.quick += 1
            self.quick += 1
            self._young[turn] = None
            if part is _NEW:
                line.new += 1
                tenant.new += 1
                self.new += 1
        if line.rate is not None:
            line.rate.take(now)
        if tenant.rate is not None:
            tenant.rate.take(now)

    def _leave_part(self, turn: Turn) -> None:
        line, part = turn.line, turn.part
        if part is _MOVED:
            self._moved.remove(holder_of(line), turn)
            return
        tenant = line.tenant
        if part is _SLOW:
            line.slow -= 1
            tenant.slow -= 1
            self.slow -= 1
            self._slow.remove(holder_of(line), turn)
            return
        line.quick -= 1
        tenant.quick -= 1
        self.quick -= 1
        del self._young[turn]
        if part is _NEW:
            line.new -= 1
            tenant.new -= 1
            self.new -= 1

    def _age(self, now: float) -> None:
        """Move what has been open for too long."""
        while self._young:
            turn = next(iter(self._young))
            if turn.began_at + SLOW_S > now + RESOLUTION_S:
                return
            line = turn.line
            self._leave_part(turn)
            turn.part = _MOVED
            self._moved.add(holder_of(line), turn)
            self._was_slow(line, now, 0.0)
            if line.tenant.waiting:
                self._place(line, now)
            self._hold_to_places(now)

    def _hold_to_places(self, now: float) -> None:
        """Call off what was moved and has no place."""
        while self.slow + len(self._moved) > self.long_max and (most := self._moved.most()):
            self._call_off(most[1], now)

    def _outstaying(self) -> Turn | None:
        """The slow request whose place somebody else has waited for, if it is open for too long."""
        found, most = self._foremost(_SLOW), self._slow.most()
        if found is None or most is None:
            return None
        has, _ = found
        if has < self.slow_max - self.slow:
            return None  # It waits for one that was called off to end.
        return most[1] if 2 * has < most[0] else None

    def _call_off(self, turn: Turn, now: float) -> None:
        self._leave_part(turn)
        turn.called_off = True
        self.called_off.append(turn)
        if turn.line.tenant.waiting:
            self._place(turn.line, now)

    @staticmethod
    def _was_slow(line: Line, now: float, penance_s: float) -> None:
        until = max(line.slow_until, now) + penance_s
        line.slow_until = min(max(until, now + SLOW_MIN_S), now + SLOW_MAX_S)
        line.proven = False

    @staticmethod
    def _part(line: Line, now: float) -> Part:
        if line.open > line.quick or line.patient or now + RESOLUTION_S < line.slow_until:
            return _SLOW
        return _QUICK if line.proven else _NEW

    # ------------------------------------------------------------------ room

    def _held(self, line: Line, now: float) -> Why | None:
        """The limit of its own that an endpoint or its tenant is at."""
        if line.in_flight_max is not None and line.open >= line.in_flight_max:
            return Why.IN_FLIGHT
        if line.rate is not None and not line.rate.ready(now):
            return Why.RATE
        return self._tenant_held(line.tenant, now)

    def _tenant_held(self, tenant: Tenant, now: float) -> Why | None:
        if not tenant.bounded:
            return None
        most = self._tenant_in_flight_max
        if most is not None and tenant.open >= most:
            return Why.TENANT_IN_FLIGHT
        if tenant.rate is not None and not tenant.rate.ready(now):
            return Why.TENANT_RATE
        return None

    def _room(self, part: Part) -> int:
        """Who has so many of the part, or more, has to wait."""
        if part is _SLOW:
            room = self.slow_max - self.slow
        else:
            room = min(self.quick_max - self.quick, self.each_max)
            if part is _NEW:
                room = min(room, self.new_max - self.new)
        # Less is free as long as what was called off has not ended.
        return min(room, self.in_flight_max - self.open)

    def _has_room(self, line: Line, part: Part) -> bool:
        ring, nobody = self._rings[part], self._nobody
        # Those without a tenant are bounded each for itself, and together while tenants wait.
        together = line.tenant is not nobody or ring.first(nobody) is not None
        return _has(line.tenant if together else line, part) < self._room(part)

    # -------------------------------------------------------------- who waits

    def _place(self, line: Line, now: float) -> None:
        """Put an endpoint where it waits, or nowhere."""
        tenant = line.tenant
        part: Part | None = None
        if line.waiting:
            if line.rate is not None and not line.rate.ready(now):
                self._timers.set(line, line.rate.ready_at)
            elif line.in_flight_max is None or line.open < line.in_flight_max:
                part = self._part(line, now)
                if now + RESOLUTION_S < line.slow_until:
                    self._timers.set(line, line.slow_until)
        if line.part is not None and line.part is not part:
            tenant.lines[line.part].discard(line)
        line.part = part
        if part is not None:
            tenant.lines[part].put(line, _has(line, part), line.served_at)
        self._place_tenant(tenant, now)

    def _place_tenant(self, tenant: Tenant, now: float) -> None:
        """Put a tenant where its endpoints wait, if it may begin anything."""
        held = None
        if tenant.waiting:
            held = self._tenant_held(tenant, now)
            if held is Why.TENANT_RATE:
                assert tenant.rate is not None
                self._timers.set(tenant, tenant.rate.ready_at)
        for part, ring, lines in zip(_PARTS, self._rings, tenant.lines, strict=True):
            if lines.amounts and held is None:
                ring.put(tenant, _has(tenant, part), tenant.served_at)
            elif tenant in ring.amounts:
                ring.discard(tenant)

    def _waits_no_longer(self, turn: Turn) -> None:
        turn.waiting = False
        turn.line.patient -= turn.cut >= CUT_MAX
        turn.line.tenant.waiting -= 1
        self.waiting -= 1

    def _grant(self, now: float) -> list[Turn]:
        """Begin what may begin; the parts take turns, because what is free is for all of them."""
        begun: list[Turn] = []
        part, misses = self._next, 0
        while self.waiting and misses < len(_PARTS):
            line = self._first(part) if self._rings[part].amounts else None
            if line is None:
                misses += 1
            else:
                misses = 0
                turn, _ = line.waiting.popitem(last=False)
                self._waits_no_longer(turn)
                self._begin(turn, part, now)
                self._place(line, now)
                begun.append(turn)
            part = _AFTER[part]
        self._next = part
        return begun

    def _first(self, part: Part) -> Line | None:
        """Whose turn it is in a part, if there is room for it."""
        room = self._room(part)
        if room <= 0:
            return None
        found = self._foremost(part)
        return None if found is None or found[0] >= room else found[1]

    def _foremost(self, part: Part) -> tuple[int, Line] | None:
        """Whose turn it is in a part, and what counts as its own there."""
        ring, nobody = self._rings[part], self._nobody
        if ring.first(nobody) is None:
            return nobody.lines[part].first()
        found = ring.first()
        assert found is not None
        has, tenant = found
        first = tenant.lines[part].first()
        assert first is not None
        return has, first[1]

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


def _has(who: Tenant | Line, part: Part) -> int:
    """How much of a part somebody has.  What it has of the quick one does not count among the
    new ones: who is always busy there would never get a new endpoint to begin."""
    if part is _QUICK:
        return who.quick
    return who.new if part is _NEW else who.slow
