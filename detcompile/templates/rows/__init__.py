"""Sums, norms and softmax over the last dimension."""
