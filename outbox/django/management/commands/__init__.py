"""One module per management command."""
