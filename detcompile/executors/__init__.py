"""Executors of a compiled model: in this process, from an archive, or in worker processes."""
