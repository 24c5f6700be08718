"""The tests; a regular package, so that an installed package named tests cannot shadow it."""
