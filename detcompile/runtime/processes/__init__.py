"""Ranks in processes of their own, and what travels to them."""
