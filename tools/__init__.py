"""Generators of pages in docs, and checks of every architecture."""
