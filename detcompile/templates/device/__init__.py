"""What families share on a GPU: the bitwise gate, launches, integers, exponentials."""
