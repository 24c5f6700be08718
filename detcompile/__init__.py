"""Bit-for-bit reproducible LLM inference by compilation."""

__version__ = "0.1.0"
