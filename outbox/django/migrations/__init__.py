"""One migration for each file of `schema/`, with the same number and name."""
