"""What an operator does: one module or folder per subject, with its SQL and its journal entries."""
