"""One step on one rank: its arrays, the forward or CUDA graph, and what is read back."""
