"""Experimental: code that has not run on the machines it is meant for. docs/limits.md says what was tried."""
