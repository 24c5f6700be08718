"""Sums and gathers over the ranks of a tensor-parallel group."""
