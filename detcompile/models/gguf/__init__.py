"""GGUF files: read, checked, and converted once to a folder in transformers' format."""
