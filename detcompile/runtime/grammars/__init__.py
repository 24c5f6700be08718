"""Grammars: which tokens may follow in a text that has to match one."""
