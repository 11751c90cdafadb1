"""The proof: relays under every fault on the user's own database, and books that must agree."""
