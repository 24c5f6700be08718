"""Training of a model whose forward is bitwise equal to the one that serves it."""
