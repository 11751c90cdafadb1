"""Errors of the store's statements."""

from __future__ import annotations


class Fenced(Exception):
    """The write was rejected by the fence: this replica is no longer the owner."""
