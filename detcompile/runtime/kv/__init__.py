"""The KV cache: blocks, prefixes and windows, and the tensors."""
