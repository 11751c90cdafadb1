"""Tokens: those of the API, and those with which receivers fetch events."""
