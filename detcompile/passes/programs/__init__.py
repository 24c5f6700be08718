"""Programs that a proven graph is compiled to, and their calls."""
