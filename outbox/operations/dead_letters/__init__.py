"""Dead letters: shown, replayed and discarded, and the skip that makes one."""
