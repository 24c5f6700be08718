"""Tokens drawn on the device from a counter RNG keyed by seed, sample and position."""
