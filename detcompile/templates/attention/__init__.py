"""Paged attention, and rotary embedding with the cache write."""
