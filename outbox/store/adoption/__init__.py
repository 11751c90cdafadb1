"""SQL of adoptions: the adopted table, its trigger, and the ledger of its rows."""
