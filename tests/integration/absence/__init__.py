"""Rows that a read does not return, although they were committed, or are gone without a record."""
