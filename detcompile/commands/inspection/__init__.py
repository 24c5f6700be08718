"""Inspects the machine for `detcompile doctor`, and reads files for `detcompile diff`."""
