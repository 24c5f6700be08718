"""Embeddings, classification, scores and reranking."""
