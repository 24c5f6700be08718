"""Where answers go: which engine serves one, and which are served alone."""
