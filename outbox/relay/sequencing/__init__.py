"""The tasks that turn committed events into deliveries; the leading replica runs them."""
