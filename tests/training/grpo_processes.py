"""Run under torchrun: a GRPOTrainer of several processes. Rank 0 writes the digest of the weights, and the logs.

torchrun --nproc-per-node 2 -m tests.training.grpo_processes FOLDER JSON-OF-CHANGED-FIELDS
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

import detcompile
from detcompile.weights import weight_digests
from tests.training.test_trl import trained


def main(folder: Path, changed: dict[str, Any]) -> None:
    """Train, save, and compare the saved weights with the policy's."""
    made = trained(folder, detcompile.compile("tiny-draft", device="cpu"), **changed)
    made.save_model(str(folder / "saved"))
    weights = {name: p.full_tensor() for name, p in made.policy.named_parameters()}  # collective
    if dist.get_rank() == 0:
        file = "adapter_model.safetensors" if changed.get("adapter") else "model.safetensors"
        saved = load_file(folder / "saved" / file)
        named = {name: f"base_model.model.{name.replace('.default.', '.')}" for name in weights}
        names = named if changed.get("adapter") else {name: name for name in weights}
        digests = weight_digests(weights)
        actual = {name: saved[names[name]] for name in weights if names[name] in saved}
        assert actual and weight_digests(actual).items() <= digests.items()
        (folder / "run.json").write_text(json.dumps({"digests": digests, "logs": made.state.log_history}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
