"""Trainers of TRL that are on policy to the bit: pip install 'detcompile[trl]'."""

from detcompile.trl.grpo import GRPOTrainer

__all__ = ["GRPOTrainer"]
