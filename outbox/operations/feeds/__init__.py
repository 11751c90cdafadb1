"""Feeds of endpoints: where they begin, and how far they are."""
