"""Measured step times, and the part of a prompt that fits a step which other requests wait for."""
