"""Drafts: who makes them, the trees they form, and their exact verification."""
