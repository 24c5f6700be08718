"""Matrix products, gated products of MLPs, and batched products."""
