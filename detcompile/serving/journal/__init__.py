"""The journal of requests with an Idempotency-Key, and the jobs that it records."""
