"""Generators of the reference pages and of the pictures."""
