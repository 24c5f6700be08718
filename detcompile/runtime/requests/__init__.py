"""Requests: parameters, prompts, outputs and their receivers."""
