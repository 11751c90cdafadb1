"""Adapters that connect a receiver to a web framework, without any logic of their own."""
