"""The mapping of another outbox table: which columns make an event, and which rows are pending."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import did_you_mean, quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYOUTS: dict[str, dict[str, Any]] = {
    "debezium": {
        "id": "id",
        "type": ["aggregatetype", "type"],
        "key": ["aggregatetype", "aggregateid"],
        "payload": "payload",
    },
}
"""Known tables.  Debezium's is that of its outbox event router with its default columns."""


@dataclass(frozen=True, slots=True)
class SourceMapping:
    """How the rows of a table become events.  Fields with `column` names have one or more columns.

    Raises:
        UsageError: a required name is missing, or two settings exclude each other.
    """

    id: str = "id"
    """Column that identifies a row, unique."""
    order_by: str | None = None
    """Column in whose order the old poller sends; None: `id`."""
    type: tuple[str, ...] = ()
    """Columns of the event type, joined by "."."""
    type_names: Mapping[str, str] = field(default_factory=dict)
    """Event types by name in the table; other names are converted by `clean_event_type`."""
    key: tuple[str, ...] = ()
    """Columns of the key, joined by ":"; none: the events have no order."""
    tenant: str | None = None
    payload: str = "payload"
    content_type: str | None = None
    """Media type of a payload that is not JSON, in a column of type bytea."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Columns of headers, by their names."""
    once: str | None = None
    """Column of an idempotency key: of rows with the same value, the first one is published."""
    sent_column: str | None = None
    """Column that shows whether a row was sent."""
    pending_value: str | None = None
    """Its value before; None: NULL, or false for a boolean column."""
    sent_value: str | None = None
    """Its value afterwards; None: the current time, or true for a boolean column."""
    sent_deleted: bool = False
    """The old poller deletes the rows that it has sent."""
    publication: str | None = None
    """The rows are sent by a connector that reads this publication, as Debezium does."""

    def __post_init__(self) -> None:
        if not self.type:
            raise UsageError("type: name the column of the event type")
        ways = {
            "sent_column": self.sent_column is not None,
            "sent_deleted": self.sent_deleted,
            "publication": self.publication is not None,
        }
        if sum(ways.values()) != 1:
            named = [name for name, is_set in ways.items() if is_set]
            problem = f"{' and '.join(named)} exclude each other" if named else "none is set"
            raise UsageError(
                "which rows are pending: set sent_column, sent_deleted or publication, "
                f"one of them; {problem}"
            )
        if (self.pending_value is None) != (self.sent_value is None):
            raise UsageError("pending_value and sent_value: set both, or neither")
        if self.pending_value is not None:
            if self.sent_column is None:
                raise UsageError("pending_value: requires sent_column")
            if self.pending_value == self.sent_value:
                raise UsageError("pending_value and sent_value are the same")

    @property
    def has_pending(self) -> bool:
        """Whether the table shows which rows are pending; a connector's position does not."""
        return self.publication is None

    @property
    def ordering(self) -> str:
        """The column in whose order pending rows are published."""
        return self.order_by or self.id

    def columns(self) -> dict[str, str]:
        """All columns, each with the setting that names it."""
        single = {"id": self.id, "order_by": self.order_by, "tenant": self.tenant}
        single |= {"payload": self.payload, "once": self.once, "sent_column": self.sent_column}
        named = {column: name for name, column in single.items() if column is not None}
        named |= dict.fromkeys(self.type, "type") | dict.fromkeys(self.key, "key")
        return named | {column: f"headers.{name}" for name, column in self.headers.items()}

    def as_json(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as `parse_mapping` reads them."""
        defaults = {each.name: each.default for each in fields(self)}
        values = asdict(self)
        return {name: each for name, each in values.items() if each and each != defaults[name]}


def parse_mapping(values: Mapping[str, Any], layout: str | None = None) -> SourceMapping:
    """The mapping of settings by name, as a file or the database has them.

    Args:
        layout: a name of `LAYOUTS`, whose settings apply where `values` has none.

    Raises:
        UsageError: a name is unknown or a value has the wrong type; the message begins with it.
    """
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"layout: there is no {quoted(layout)}; there is: {', '.join(LAYOUTS)}")
    known = {each.name for each in fields(SourceMapping)}
    merged: dict[str, Any] = dict(LAYOUTS.get(layout or "", {}))
    for name, value in values.items():
        if name not in known:
            hint = did_you_mean(name, known, f"there are: {', '.join(sorted(known))}")
            raise UsageError(f"{name}: there is no such setting of a mapping; {hint}")
        merged[name] = value
    return SourceMapping(**{name: _parsed(name, value) for name, value in merged.items()})


def _parsed(name: str, value: Any) -> Any:
    if name in ("type", "key"):
        columns = [value] if isinstance(value, str) else value
        if not isinstance(columns, list | tuple) or not all(_is_name(each) for each in columns):
            raise UsageError(f"{name}: must be a column or a list of columns")
        return tuple(columns)
    if name in ("type_names", "headers"):
        if not isinstance(value, dict) or not all(
            isinstance(each, str) for pair in value.items() for each in pair
        ):
            raise UsageError(f"{name}: must be a mapping of texts")
        return dict(value)
    if name == "sent_deleted":
        if not isinstance(value, bool):
            raise UsageError("sent_deleted: must be true or false")
        return value
    if value is not None and not (isinstance(value, str) and (value or name.endswith("_value"))):
        raise UsageError(f"{name}: must be a text, not {quoted(value)}")
    return value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
