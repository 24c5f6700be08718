"""Paged attention and the rotation with the cache write."""
