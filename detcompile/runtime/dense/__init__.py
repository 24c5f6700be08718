"""Padded batches, as generate() and a plain call of a model take them."""
