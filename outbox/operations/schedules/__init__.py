"""Schedules: shown, added, changed, and run by hand."""
