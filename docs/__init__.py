"""Generators of the pages that lie beside them."""
