"""Trace of an event: its history, read and explained."""
