"""Weights of four and eight bits, and products over them."""
