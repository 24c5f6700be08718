"""Trainers of TRL that are on policy to the bit: pip install '.[trl]' in a checkout."""

from detcompile.trl.async_grpo import AsyncGRPOTrainer
from detcompile.trl.grpo import GRPOTrainer
from detcompile.trl.weight_transfer import FolderWeightTransfer

__all__ = ["AsyncGRPOTrainer", "FolderWeightTransfer", "GRPOTrainer"]
