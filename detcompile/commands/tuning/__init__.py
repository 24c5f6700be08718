"""Measurements and output of `detcompile tune-speculation`."""
