"""Receipts: what answers were made of, signed, in a chained log, and replayed by whoever doubts them."""
