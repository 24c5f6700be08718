"""One program per distinct layer: find layers that compute the same, and cut the graph between layers."""
