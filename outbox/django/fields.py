"""Fields for what publishers write: a value that Python cannot represent makes no query fail."""

from __future__ import annotations

from typing import Any

from django.db import models

from outbox.core.model.event import EARLIEST, LATEST


class TextArrayField(models.Field):
    """A column of type text[]; drivers return it as a list.

    Django's ArrayField would require `django.contrib.postgres`.
    """

    def db_type(self, connection: Any) -> str:
        """The type of the column."""
        return "text[]"


class EventTimeField(models.DateTimeField):
    """A time; one beyond Python's range is read as the nearest one."""

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        """Limit the time in the query, because drivers raise an error for a whole result."""
        limited = f"greatest(least({sql}, '{LATEST}'::timestamptz), '{EARLIEST}'::timestamptz)"
        return f"CASE WHEN {sql} IS NOT NULL THEN {limited} END", (*params, *params)


class PayloadField(models.JSONField):
    """JSON; the text itself if Python's parser refuses it: a number of 5,000 digits, 2,000 levels.

    A number with a fraction is a float, which may round it.
    """

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Parse the text."""
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError):
            return value
