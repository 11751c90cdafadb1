"""Without this file, test modules of different leaves would have the same name, `tests.…`."""
