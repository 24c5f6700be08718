"""Pages that commands write: a certificate or a refusal, and the drawings of its sums."""
