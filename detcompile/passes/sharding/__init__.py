"""Tensor parallelism: the share of a model that each rank keeps."""
