"""From raw rows to batches of tokens."""
