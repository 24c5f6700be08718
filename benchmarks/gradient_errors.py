"""Distances of gradients to float64: a trainer's, and plain torch's in the same dtype, by group of parameters.

    python -m benchmarks.gradient_errors --json OUT [--models llama,qwen3 --dtypes bfloat16]

Small models with random weights (tests/training/cases.py), whose weights are those of the dtype in all three. Torch
reads each sequence by itself; float64 is torch's too. Writes its JSON after each row.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

import detcompile
from benchmarks.cpu import cpu_name
from detcompile import Trainer
from tests.model_cases import MAX_CONTEXT, random_model
from tests.training.cases import ARCHITECTURES, gradient_errors, sequences

__all__ = ["LENGTHS", "row"]

LENGTHS = (40, 7, 130, 2, 64, 15)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def row(trainer: Trainer, name: str, dtype: str) -> dict[str, Any]:
    """Of each group of parameters the two relative errors, and ours over torch's."""
    found = list(gradient_errors(trainer, name, DTYPES[dtype], sequences(LENGTHS)))
    groups = {group: {"detcompile": ours, "torch": torchs, "ratio": ours / torchs} for group, ours, torchs in found}
    return {"model": name, "dtype": dtype, "groups": groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    arguments = parser.parse_args()
    report: dict[str, Any] = {"commit": arguments.commit, "hardware": cpu_name(), "torch": torch.__version__}
    report["rows"] = []
    for dtype, name in itertools.product(arguments.dtypes.split(","), arguments.models.split(",")):
        trainer = detcompile.trainer(random_model(name, DTYPES[dtype]), max_context=MAX_CONTEXT)
        report["rows"].append(row(trainer, name, dtype))
        print(report["rows"][-1], flush=True)
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
