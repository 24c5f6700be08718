"""One program a distinct layer: which layers of a model are the same, and a graph cut where they meet."""
