"""HTTP servers of our own: where they listen, and how they begin and end."""
