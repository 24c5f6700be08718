"""Training of a model whose forward is, bit for bit, the one that serves it."""
