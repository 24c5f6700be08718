"""Requests: what they ask for, what they became, whose they are."""
