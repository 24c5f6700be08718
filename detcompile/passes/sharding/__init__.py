"""What a rank of a tensor-parallel group keeps of a model."""
