"""Errors of the store's statements."""

from __future__ import annotations


class Fenced(Exception):
    """The write was rejected by the fence: this replica is no longer the owner."""


class ResponseLost(ConnectionResetError):
    """The connection was lost during a write, and was opened again; the lost backend has ended.

    Whether it was written can be read.
    """
