"""Reasoning of thinking models: its formats, and the parameters of answers with it."""
