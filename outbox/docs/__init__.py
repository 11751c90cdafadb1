"""The documentation, by kind, and the generator of its reference pages."""
