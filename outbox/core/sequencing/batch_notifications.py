"""What the replica that sequences tells the others: which lanes got something.

Told by notifications, whose text is short: first and last batch, and the last
number of every lane that got something in one of them.

    41-43 7:12 19:3

With it a replica need not read what it is told.  Only what follows what it
knows already will do; after a gap it has to read.  Batches are told no more
often than each `TELL_EVERY_S`: the first one at once, and those that follow it
closely together.  Otherwise every event of a steady trickle would wake
everybody.  Nothing depends on being told, because all look for themselves, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

TELL_EVERY_S = 0.02
TELL_WITHIN_S = 0.025
"""What no later batch told by then is told by itself."""
TEXT_CHARS_MAX = 7000
"""PostgreSQL takes a little less than 8,000 bytes."""
LANES_MAX = TEXT_CHARS_MAX // 4
LATER = ""
"""The text that says only that there is something to read."""


@dataclass(frozen=True, slots=True)
class News:
    """Some batches that follow each other."""

    first: int
    last: int
    last_seqs: Mapping[int, int] = field(default_factory=dict)
    """By lane, the last number given out in it."""

    def text(self) -> str:
        """As others read it; `LATER` if that is too long."""
        if len(self.last_seqs) > LANES_MAX:
            return LATER
        lanes = "".join(f" {lane}:{seq}" for lane, seq in self.last_seqs.items())
        text = f"{self.first}-{self.last}{lanes}"
        return text if len(text) <= TEXT_CHARS_MAX else LATER

    @classmethod
    def parse(cls, text: str) -> News | None:
        """What a text says; None: nothing that could be understood."""
        head, *lanes = text.split(" ")
        try:
            first, last = map(int, head.split("-"))
            last_seqs = {int(lane): int(seq) for lane, seq in (each.split(":") for each in lanes)}
        except ValueError:
            return None
        return cls(first, last, last_seqs)


class Teller:
    """What is to be told, and when; times are seconds of any steady clock."""

    def __init__(self) -> None:
        self.alone = False
        """There is nobody to be told."""
        self._told_at = -inf
        # The first batch that was not told, and what it and those after it gave out.
        self._first: int | None = None
        self._untold: dict[int, int] = {}

    def text(self, batch: int, last_seqs: Mapping[int, int], now: float) -> str | None:
        """What to tell with a batch that is about to be written; None: nothing yet."""
        if now - self._told_at < TELL_EVERY_S:
            return None
        first = batch if self._first is None else self._first
        return News(first, batch, {**self._untold, **last_seqs}).text()

    def written(self, batch: int, last_seqs: Mapping[int, int], now: float, *, told: bool) -> None:
        """A batch was committed, and what it should tell with it."""
        if told and last_seqs:
            self.told(now)
            return
        if self._first is None:
            self._first = batch
        self._untold.update(last_seqs)

    def tell_at(self) -> float:
        """When to tell what no later batch has told by then; infinite: there is nothing."""
        return self._told_at + TELL_WITHIN_S if self._untold and not self.alone else inf

    def told(self, now: float) -> None:
        """Everything was told."""
        self._told_at = now
        self._first = None
        self._untold.clear()
