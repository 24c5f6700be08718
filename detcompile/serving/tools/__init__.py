"""Calls of functions: how families of models write them, read from texts, and the grammars that hold models to them."""
