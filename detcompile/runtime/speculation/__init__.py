"""Speculation: drafters, draft trees, and their exact verification."""
