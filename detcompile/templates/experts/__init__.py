"""Products of tokens with their experts."""
