"""Passes over a graph, each ``gm -> gm``: reductions and products become templates of a fixed order."""
