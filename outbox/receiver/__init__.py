"""The other end: reading deliveries, dropping copies, noticing what is missing.

Imports nothing of the relay but its core.
"""
