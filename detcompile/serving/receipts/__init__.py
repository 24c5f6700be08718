"""Receipts: signed records of answers and everything they depend on, in a chained log, and their replay."""
