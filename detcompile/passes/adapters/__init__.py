"""Adapters for classes of transformers whose forward looks at the batch, one by one."""
