"""The simulated server: tables, transactions, locks, sessions and connections."""
