"""What an operator does: one module per subject, with its SQL and its journal entries."""
