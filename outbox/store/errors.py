"""Errors of the store's statements."""

from __future__ import annotations

ABORTED = "OB001"
"""The error code of the SQL function `abort_unless`."""


class Fenced(Exception):
    """The write was rejected by the fence: this replica is no longer the owner."""


class ResponseLost(ConnectionResetError):
    """The connection was lost during a write, and was opened again; the lost backend has ended.

    Whether it was written can be read.
    """
