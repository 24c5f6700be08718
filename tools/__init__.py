"""Generate pages of the docs, and check every architecture."""
