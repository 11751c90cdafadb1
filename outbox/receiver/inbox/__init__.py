"""Inbox: deduplication state in the database of the effects, written in their transaction.

A delivery and its effects are committed together, or neither is.

    process       the statements that record a delivery; sans-IO
    statements    the SQL for PostgreSQL and SQLite
    inbox         the public class
    memory        an in-memory inbox with a limited time window
"""
