"""HTML pages of certificates and refusals."""
