"""Trainers of TRL that are on policy to the bit: pip install '.[trl]' in a checkout."""

from detcompile.trl.grpo import GRPOTrainer

__all__ = ["GRPOTrainer"]
