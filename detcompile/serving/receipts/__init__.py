"""Receipts: signed records of answers and everything they depend on, kept in a chained log, and replayed to verify
them."""
