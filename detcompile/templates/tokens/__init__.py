"""Embedding, Gumbel noise with argmax, next tokens, copies of cache blocks."""
