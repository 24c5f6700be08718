"""Requests that outlive the front: a journal of them, and their answers for clients that come back."""
