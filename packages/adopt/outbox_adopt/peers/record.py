"""The members of a record, which must be what the other sender's API documents.

A message never contains a value, which may be a secret.
"""

from __future__ import annotations

from typing import Any

from outbox.errors import UsageError


class Record:
    """An object of the file.

    Args:
        place: the position for messages, such as `endpoints[2].endpoint`.

    Raises:
        UsageError: it is not an object.
    """

    def __init__(self, values: object, place: str) -> None:
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise UsageError(f"{place}: must be an object")
        self.values = values
        self.place = place

    def object(self, name: str) -> Record:
        """A member that is an object; an empty one if it is missing."""
        return Record({} if self.values.get(name) is None else self.values[name], self._at(name))

    def objects(self, name: str) -> list[Record]:
        """A member that is a list of objects; an empty one if it is missing."""
        found = self._list(name)
        return [Record(each, f"{self._at(name)}[{n}]") for n, each in enumerate(found)]

    def text(self, name: str) -> str | None:
        """A member that is a text; None: it is missing, null or empty."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{self._at(name)}: must be a text")
        return value or None

    def collected(self, name: str) -> Record:
        """An object that must be there, because what it has must not be lost unseen."""
        if self.values.get(name) is None:
            raise UsageError(f"{self._at(name)}: is missing; was all of it collected?")
        return self.object(name)

    def required(self, name: str) -> str:
        """A text that must be there."""
        value = self.text(name)
        if value is None:
            raise UsageError(f"{self._at(name)}: is missing")
        return value

    def texts(self, name: str) -> list[str]:
        """A member that is a list of texts; an empty one if it is missing."""
        found = self._list(name)
        for n, each in enumerate(found):
            if not isinstance(each, str):
                raise UsageError(f"{self._at(name)}[{n}]: must be a text")
        return found

    def number(self, name: str) -> float | None:
        """A member that is a number; None: it is missing, null or zero."""
        value = self.values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"{self._at(name)}: must be a number")
        return value or None

    def flag(self, name: str) -> bool:
        """A member that is true or false; false if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{self._at(name)}: must be true or false")
        return bool(value)

    def headers(self, name: str) -> dict[str, str]:
        """A member whose members are texts."""
        found = self.object(name)
        return {each: found.required(each) for each in found.values}

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise UsageError(f"{self._at(name)}: must be a list")
        return value or []

    def _at(self, name: str) -> str:
        return f"{self.place}.{name}"
