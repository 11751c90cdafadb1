"""A relay in a process: with its listeners, and inside of an application."""
