"""Examination and repair of an installation: `outbox trace`, `doctor`, `verify` and others.

`trace` has the history of one event, `verify` the guarantees over the tables, and `maintenance` the
changes of a whole installation.  The modules beside them are the checks of `outbox doctor`.
"""
