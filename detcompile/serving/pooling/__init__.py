"""Requests of models that say one thing of a whole sequence: embeddings, classes and scores."""
