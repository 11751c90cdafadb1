"""What the other parts of the store write statements with: expressions, rows, messages."""
