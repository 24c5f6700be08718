"""The products of tokens with their experts."""
