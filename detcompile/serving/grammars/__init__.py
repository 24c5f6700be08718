"""Grammars that requests bring, tried in a process that can be ended before an engine sees them."""
