"""Operations of exact-1 (docs/exact.md): the same bytes on every machine."""
