"""The certificate: how axes move through every operation, and which order every sum has."""
