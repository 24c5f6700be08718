"""Generators of pages in docs: the census, and what became of every model."""
