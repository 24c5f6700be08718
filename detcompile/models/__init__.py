"""Objects that users hold: compiled models in this process, in worker processes, and from archives."""
